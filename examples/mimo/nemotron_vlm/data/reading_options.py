# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options that decide what is read, which trainings and surveys of data share."""

import argparse
from dataclasses import dataclass, field
from typing import Literal

from examples.mimo.common.config_file import nearest
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.rows import Packing
from examples.mimo.nemotron_vlm.model.presets import PRESETS, VLMPreset, find_preset
from megatron.training.argument_utils import ArgumentGroupFactory


@dataclass
class ReadingOptions:
    """Options of a model and of how its samples are read."""

    model: str = field(
        default="tiny",
        metadata={
            "argparse_meta": {
                "help": f"sizes, which options override: {', '.join(sorted(PRESETS))}, or the "
                "model.json of a converted checkpoint"
            }
        },
    )
    pack: bool = False
    """pack as many samples as fit into a row of --seq-length tokens; samples do not attend to each
    other, and batch sizes count rows"""
    pack_window: int = Packing().window
    """number of consecutive samples that are packed together"""
    sample_multiple: int = Packing().multiple
    """with --pack, pad each sample to a multiple of so many tokens, which must be a multiple of tp,
    or of 2·cp·tp with context parallelism"""
    dynamic_resolution: bool = False
    """encode images whole, whatever their size, instead of tiles"""
    dynamic_resolution_min_patches: int | None = None
    """with --dynamic-resolution, enlarge images of fewer patches; default: the model's"""
    dynamic_resolution_max_patches: int | None = None
    """with --dynamic-resolution, shrink images of more patches; default: the model's"""
    video_target_num_patches: int | None = None
    """with --dynamic-resolution, patches of a frame of a clip of video, about; default: the
    model's"""
    video_frames: int | None = None
    """frames of a clip of video, or all of a shorter one; default: --video-fps"""
    video_fps: float | None = None
    """frames of a clip in a second; default: all"""
    max_tiles: int = 12
    """most tiles of an image, not counting its thumbnail"""
    thumbnail: bool = True
    """leave out the thumbnail of the whole image that an image of several tiles gets"""
    bad_samples: Literal["skip", "refuse"] = "skip"
    """skip samples that cannot be used, or refuse a data set that has any"""
    long_samples: Literal["skip", "refuse", "cut"] = "skip"
    """skip samples of more than --seq-length tokens, refuse a data set that has any, or cut off the
    end of their answers; those are skipped whose media alone do not fit"""
    prompt: str = "Describe the image."
    """question asked where a sample has only a caption"""
    image_token: str = "<image>"
    """the tokenizer's token for an image"""
    surveys: str | None = None
    """directory of the data's surveys; default: beside the data"""


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add a dataclass's fields to a parser as options, and make its errors `UserError`s."""
    ArgumentGroupFactory(options).build_group(parser, "Nemotron VLM")

    def refuse(message: str):
        marker = "unrecognized arguments: "
        unknown = message.removeprefix(marker).split()[0] if marker in message else ""
        name = unknown.partition("=")[0]
        hint = nearest(name, parser._option_string_actions) if name else ""
        raise UserError(f"{message}{hint or '; see --help'}")

    parser.error = refuse


def preset_of(args: argparse.Namespace) -> VLMPreset:
    """Return the model that ``--model`` names, with the encoder of images that options ask for.

    Raises:
        UserError: there is no such model.
    """
    preset = find_preset(args.model)
    if not args.dynamic_resolution:
        return preset
    limits = args.dynamic_resolution_min_patches, args.dynamic_resolution_max_patches
    return preset.with_images_of_any_size(*limits, args.video_target_num_patches)


def media_violation(args: argparse.Namespace, preset: VLMPreset) -> str | None:
    """Return what is wrong with the sizes of whole images and frames, or None."""
    images, option = preset.images, "--dynamic-resolution"
    limits = args.dynamic_resolution_min_patches, args.dynamic_resolution_max_patches
    clips = args.video_target_num_patches, args.video_frames, args.video_fps
    if not args.dynamic_resolution and limits != (None, None):
        return f"{option}-min-patches and -max-patches need {option}"
    if clips != (None, None, None) and not (args.dynamic_resolution and images.tubelet > 1):
        return f"--video-… options need {option} and a --model with video"
    if args.video_fps is not None and not args.video_fps > 0:
        return f"--video-fps must be above 0, not {args.video_fps}"
    least = images.pixel_shuffle**2
    if args.dynamic_resolution and images.clip_patches < least:
        return f"--video-target-num-patches must be {least} or more, not {images.clip_patches}"
    if args.dynamic_resolution and not least <= images.min_patches <= images.max_patches:
        return (
            f"{option}-min-patches {images.min_patches} must be from {least} "
            f"to {option}-max-patches, {images.max_patches}"
        )
    return None
