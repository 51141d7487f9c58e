# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/user on data of your own, word for word, on small folders of media; and the
tools that make data.
"""

import contextlib
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import examples.mimo.nemotron_vlm.energon as package
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from megatron.energon.cli.main import main as energon
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import sound

REPOSITORY = Path(__file__).resolve().parents[5]
PAGES = [REPOSITORY / "docs/user" / f"{name}.md" for name in ("your-own-data", "video-and-sound")]
DOCUMENT = "\n".join(page.read_text() for page in PAGES)


def block(kind: str, containing: str) -> str:
    """The only fenced block of this kind with this text."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (found,) = (text for name, text in blocks if name == kind and containing in text)
    return found


def run(command: str) -> str:
    """Run a command, energon's and a survey in this process; return what these print."""
    program, *arguments = shlex.split(command.replace("\\\n", " ").replace(" --workers 2", ""))
    if program == "python":
        subprocess.run([sys.executable, *arguments], check=True)
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if program == "energon":
            energon(arguments, standalone_mode=False)
        else:
            assert program == "tools/data/survey.py" and main(arguments) == 0
    return said.getvalue()


def test_its_commands_make_a_data_set_and_a_blend(digits, tmp_path, monkeypatch):
    """Two thirds of the 60 conversations, on the digits' tokenizer, have an image."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    entries = []
    for number in range(60):
        turns = [{"from": "human", "value": "copy 3"}, {"from": "gpt", "value": "3"}]
        entries.append({"conversations": turns})
        if number % 3:
            entries[-1]["image"] = f"{number}.{'png' if number % 2 else 'jpg'}"
            path = tmp_path / "photos" / entries[-1]["image"]
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (8 * number, 16)).save(path)
    Path("photos.json").write_text(json.dumps(entries))
    Path("build").mkdir()
    Path("build/digits").symlink_to(digits)
    Path("shards.py").write_text(block("python", '"image" in entry'))
    run(block("bash", "python shards.py"))
    run(block("bash", "energon prepare"))
    survey = block("bash", "--max-tiles 6 --seq-length")
    assert "--max-tiles 6" in survey and "--max-tiles 6" in block("bash", "energon:../photos")
    printed = run(survey)
    assert "train: 58 samples in 1 shards, 58 good, 19 of them text only" in printed
    printed = run(block("bash", "digits/tokenizer --dynamic-resolution"))
    assert "39 with 1 · mean 0.67" in printed
    assert "recommended: --seq-length 32 --dynamic-resolution-max-patches 104, " in printed
    tokenizer = Path("build/digits/tokenizer")
    assert digits_data.source(Path("build/photos"), tokenizer, encoder=digits_data.whole(tokenizer))
    Path("build/blend.yaml").write_text(block("yaml", "MetadatasetV2"))
    run(block("bash", "tools/data/survey.py build/blend.yaml"))
    opened = digits_data.source(Path("build/blend.yaml"), Path("build/digits/tokenizer"))
    drawn = [opened.name("train", number) for number in range(40)]
    assert sum("photos" in name for name in drawn) == 30
    assert len(digits_data.names(opened, "test", range(2))) == 2


def test_its_data_with_video_and_sound_are_read(omni_shards, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "build" / "omni"
    make, _, asked = block("bash", "--tasks omni").partition("\n")
    made.parent.mkdir()
    made.symlink_to(omni_shards)
    assert "train: 84 samples in 4 shards, 84 good" in run(asked)
    assert digits_data.source(made, encoder=digits_data.omni(made / "tokenizer"), seq_length=48)
    assert make.split()[1] == "build/omni" and "--seq-length 48" in block("bash", "--encoder sound")

    talk = json.loads(block("json", '"messages"'))
    more = json.loads(json.dumps(talk))
    items = more["messages"][0]["content"]
    items += [{"type": "image", "path": "odd.png"}, items[0]]
    glass = tmp_path / "media" / "glass"
    glass.mkdir(parents=True)
    for number in range(11):
        Image.new("L", (32, 24), 9 * number).save(glass / f"{number}.png")
    (glass / ".DS_Store").write_bytes(b"")
    glass.with_suffix(".wav").write_bytes(sound(np.zeros(11025), 44100))
    glass.with_name("odd.png").write_bytes(digits_data.image(101, 7))
    Path("talks.json").write_text(json.dumps([talk, more]))
    Path("talks.py").write_text(block("python", '"path" in item'))
    run(re.search("`(python talks.py .*?)`", DOCUMENT)[1])
    run(block("bash", "energon prepare").replace("photos", "talks"))
    printed = run(asked.replace("build/omni ", "build/talks "))
    assert "train: 1 samples in 1 shards, 1 good" in printed
    given = {"encoder": digits_data.omni(made / "tokenizer"), "seq_length": 999}
    opened = digits_data.source(made.with_name("talks"), made / "tokenizer", **given)
    clip, *others = opened.inputs("train", 0, IMAGES)
    assert clip.ndim == 4 and [each.ndim for each in others] == [3, 4]
    shown = clip.reshape(6, -1, 2, 3 * 4**2).mean((1, 3))
    assert shown.round().flatten().tolist() == [*range(0, 99, 9), 90]
    assert len(opened.inputs("train", 0, SOUND)) == 1


def test_a_missing_package_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.energon", None)
    with pytest.raises(UserError, match=r"needs megatron.energon; .* pip install '.\[energon\]'"):
        importlib.reload(package)


def test_the_tool_does_not_write_over_data(digits, capsys):
    assert digits_data.make_webdataset.main([str(digits), "--samples", "8", "--seed", "0"]) == 2
    assert "is there already" in capsys.readouterr().err
