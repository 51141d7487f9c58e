# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sound files as mono waveforms of the encoder's sampling rate."""

import io
import warnings
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from scipy.io import wavfile
from scipy.signal import resample_poly

from examples.mimo.nemotron_vlm.data.sound_lengths import SAMPLING_RATE, SHORTEST, rows_of
from examples.mimo.nemotron_vlm.energon.errors import BadSound, MissingPackage, one_line

FLAC = b"fLaC"
"""The first bytes of a FLAC file."""


@dataclass(frozen=True)
class Listening:
    """Settings of how files become sounds.

    subsampling: log-mel frames that become a row.
    """

    subsampling: int

    def read(self, data: bytes) -> torch.Tensor:
        """Return the mean over channels, from -1 to 1, at the encoder's rate: float32 [samples].

        Other rates are resampled by a polyphase filter.

        Raises:
            BadSound: the file is damaged, of another format, or too short.
            MissingPackage: it is FLAC, and soundfile is not installed.
        """
        samples, rate = _decoded(data)
        size = -(-len(samples) * SAMPLING_RATE // rate)
        if size < SHORTEST:
            raise BadSound(f"{size} samples, of {SAMPLING_RATE} a second, are less than {SHORTEST}")
        sound = samples.mean(axis=1)
        if rate != SAMPLING_RATE:
            common = gcd(rate, SAMPLING_RATE)
            sound = resample_poly(sound, SAMPLING_RATE // common, rate // common)
        return torch.from_numpy(sound.astype(np.float32))

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the rows that sounds become, each of which is a token."""
        return rows_of(sizes, self.subsampling)


def picture_of(sound: torch.Tensor) -> torch.Tensor:
    """Return the spectrogram of a sound, uint8 [3, 64, W], dark where and when it is loud."""
    spectrum = torch.stft(sound, 126, 160, window=torch.hann_window(126), return_complex=True)
    loud = spectrum.abs().clamp(1e-2, 10).log10()
    return ((1 - loud) * (255 / 3)).byte().flip(0).expand(3, -1, -1)


def _decoded(data: bytes) -> tuple[np.ndarray, int]:
    """Return a file's samples, float64 [samples, channels] from -1 to 1, and its rate."""
    try:
        samples, rate = _flac(data) if data.startswith(FLAC) else _wav(data)
    except (BadSound, MissingPackage):
        raise
    except Exception as error:  # of all kinds, for damaged files
        raise BadSound(f"neither FLAC nor WAV, or damaged: {one_line(error)}") from error
    return samples.reshape(len(samples), -1), rate


def _wav(data: bytes) -> tuple[np.ndarray, int]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Reached EOF prematurely")
        warnings.filterwarnings("ignore", "Chunk")
        rate, samples = wavfile.read(io.BytesIO(data))
    if samples.dtype.kind == "f":
        return samples.astype(np.float64), rate
    half = 1 << 8 * samples.itemsize - 1  # 24 bits are the upper ones of 32
    return (samples.astype(np.float64) - half * (samples.dtype.kind == "u")) / half, rate


def _flac(data: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise MissingPackage("FLAC needs soundfile: pip install '.[flac]'") from error
    try:
        return soundfile.read(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise BadSound(error.error_string) from error
