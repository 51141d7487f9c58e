# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations have the ids that the processor of Nemotron 3 Nano Omni gives in transformers."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, ParakeetFeatureExtractor
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3Processor,
)
from transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3VideoProcessor,
)
from transformers.processing_utils import ImagesKwargs

from examples.mimo.nemotron_vlm.energon.conversation import AROUND, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder, read_files
from examples.mimo.nemotron_vlm.energon.images import Resizing
from examples.mimo.nemotron_vlm.energon.records import MediaFile, read_record
from examples.mimo.nemotron_vlm.energon.videos import Watching
from megatron.energon import CrudeSample
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CLIPS,
    GRIDS,
    READER,
    byte_tokenizer,
    image,
)
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import sound

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}
{%- if item.type == 'text' %}{{ item.text }}{% endif %}
{%- if item.type == 'video' %}<video>{% endif %}
{%- if item.type == 'image' %}<image>
{% endif %}{% if item.type == 'audio' %}<so_embedding>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}"""
SPECIAL = ["<image>", "<so_embedding>", *(token for pair in AROUND.values() for token in pair)]
ITEMS = [
    {"type": "text", "text": " Is this "},
    {"type": "image"},
    {"type": "text", "text": "louder than  that? \n"},
    {"type": "audio"},
    {"type": "image"},
]
THANKS = [{"type": "text", "text": "So?"}, {"type": "audio"}]
CLIP = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Whither? "}]
TALKS = {
    "items": [("system", "Be  brief."), ("user", ITEMS), ("assistant", " No. ")],
    "two turns": [("user", ITEMS), ("assistant", "a"), ("user", THANKS), ("assistant", "b")],
    "clip": [("user", CLIP), ("assistant", "Up.")],
    "text": [("user", "<image>: is it <so_embedding>?"), ("assistant", "Yes.")],
}
SHAPES = [(33, 20), (60, 8)]
SOUNDS = [np.sin(np.arange(samples) / 9) for samples in (4000, 12801)]
FRAMES = 5


class Images:
    """Stands in for the image processor, which needs torchvision: its grids alone."""

    downsample_ratio = 1 / GRIDS.pixel_shuffle
    model_input_names = ["image_grid_hw"]
    valid_kwargs = ImagesKwargs

    def __call__(self, images, **_):
        shapes = [GRIDS.grid_of(each.height, each.width) for each in images]
        return {"image_grid_hw": torch.tensor(shapes)}

    def fetch_images(self, images):
        return images


@pytest.mark.parametrize(
    ("name", "fps"), [*((name, 0) for name in TALKS), ("clip", 2), ("clip", 6.3)]
)
def test_ids_are_the_released_processors(tmp_path, monkeypatch, name, fps):
    texts = str(TALKS[name])
    shapes = SHAPES[: texts.count("image")]
    sounds = SOUNDS[: texts.count("audio") + texts.count("<so_")]
    frames = FRAMES * (name == "clip")
    messages = [{"role": role, "content": content} for role, content in TALKS[name]]

    made = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path, TEMPLATE, SPECIAL))
    released = NemotronH_Omni_Reasoning_V3Processor
    monkeypatch.setattr(released, "check_argument_for_proper_class", lambda *_: None)
    clips = NemotronH_Omni_Reasoning_V3VideoProcessor(
        patch_size=CLIPS.patch,
        temporal_patch_size=CLIPS.tubelet,
        video_target_num_patches=CLIPS.patches,
        norm_mean=[0.0] * 3,
        norm_std=[1.0] * 3,
    )
    processor = released(Images(), clips, made, ParakeetFeatureExtractor(16, 16000))
    text = processor.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    pixels = [Image.new("RGB", shape) for shape in shapes]
    videos = [np.zeros((FRAMES, 24, 32, 3), np.uint8)] if frames else None
    metadata = [{"total_num_frames": FRAMES, "fps": fps or None}]
    asked = {"num_frames": 3, "do_sample_frames": True, "video_metadata": metadata}
    made = processor(pixels, text, videos, sounds or None, videos_kwargs=asked)
    wanted = made["input_ids"][0]

    files = {f"{n}.png": image(*shape) for n, shape in enumerate(shapes)}
    files |= {f"{n}.wav": sound(samples) for n, samples in enumerate(sounds)}
    files |= {f"video.{n}.png": image(32, 24) for n in range(frames)}
    for message in messages:
        if isinstance(message["content"], str):  # our placeholder of a sound
            message["content"] = message["content"].replace("<so_embedding>", "<sound>")
    named = {name: MediaFile(name) for name in files}
    named["json"] = {"messages": messages, "fps": fps}
    record = read_record(CrudeSample(named), "")
    more = {"subsampling": READER.subsampling, "video": Watching(CLIPS, frames=3)}
    encoder = Encoder(Chat(tmp_path, sound=True), Resizing(GRIDS), **more)
    media = encoder.read(read_files(files, record.media))
    found = encoder.text(record, [each.extent for each in media])
    assert [*found.input_ids.tolist(), int(found.labels[-1])] == wanted
