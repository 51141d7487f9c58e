# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sound files as mono waveforms of the encoder's sampling rate."""

import io
import re

import numpy as np
import torch

from examples.mimo.nemotron_vlm.energon.errors import BadMedium, MissingPackage
from examples.mimo.nemotron_vlm.model.media_sizes import SAMPLING_RATE, SHORTEST

RATES = range(1000, 1_000_001)
"""Samples in a second that a file may have."""

LONGEST = 1 << 62
"""More samples stand for a number that is not known, as in FLAC that was written to a pipe."""

COUNTED = re.compile(rb"(?:Xing|Info)\0{3}[^\0\x02\x04\x06\x08\x0a\x0c\x0e]", re.DOTALL)
"""The tag in the first frame of an MP3 file that says how many frames there are."""

LOUDEST = 16
"""Largest sample: files of floats may exceed the full scale, 1, but not by more than 24 dB."""


def read_sound(data: bytes) -> torch.Tensor:
    """Return the mean over channels, from -1 to 1, at the encoder's rate: float32 [samples].

    It is read and resampled as by transformers' ``load_audio`` with soundfile and soxr.

    Raises:
        BadMedium: the file is damaged, of another format, or too short; its rate is none of
            `RATES`; or a sample is no number, or above `LOUDEST`.
        MissingPackage: soundfile or soxr is not installed.
    """
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: without its library in C
        raise MissingPackage("sound needs soundfile, soxr: pip install '.[sound]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, count = file.samplerate, file.frames
            if count > LONGEST:
                raise BadMedium("its header does not say how many samples it has: convert it")
            if file.format == "MP3" and not _is_counted(data):
                count = 0
            samples = file.read(file.frames, "float32", always_2d=True).T
    except soundfile.LibsndfileError as error:
        line = f"damaged, or in a format that is not read: {error.error_string}"
        raise BadMedium(line) from error
    if samples.shape[1] < count or _is_cut_short(data):
        raise BadMedium("damaged: the file is shorter than its header says")
    if rate not in RATES:
        raise BadMedium(f"{rate} samples a second; from {RATES[0]} to {RATES[-1]} are read")
    size = -(-samples.shape[1] * SAMPLING_RATE // rate)
    if size < SHORTEST:
        raise BadMedium(f"{size} samples, of {SAMPLING_RATE} a second, are less than {SHORTEST}")
    if not (peak := np.abs(samples).max()) <= LOUDEST:  # nor is NaN
        raise BadMedium(f"a sample of {peak:g}: they are from -1 to 1, {LOUDEST} at most")
    sound = samples.mean(axis=0) if len(samples) > 1 else samples[0]
    if rate != SAMPLING_RATE:
        sound = soxr.resample(sound, rate, SAMPLING_RATE, quality="soxr_hq")
        sound = np.pad(sound, (0, max(0, size - len(sound))))[:size]
    return torch.from_numpy(np.ascontiguousarray(sound))


def _is_counted(data: bytes) -> bool:
    """Return whether an MP3 file says how many frames it has; else libsndfile guesses it."""
    tag = 0  # of ID3, before the first frame: each byte of its length has seven bits
    if data[:3] == b"ID3":
        for byte in data[6:10]:
            tag = tag << 7 | byte
        tag += 10
    return COUNTED.search(data, tag, tag + 256) is not None


def _is_cut_short(data: bytes) -> bool:
    """Return whether a WAV file ends before its RIFF chunk does, which libsndfile passes over.

    A file that was written to a pipe gives no length: all bits are set. The last byte may be
    padding, which some programs count and do not write.
    """
    length = int.from_bytes(data[4:8], "little")
    return data[:4] == b"RIFF" and len(data) - 7 < length < (1 << 32) - 1
