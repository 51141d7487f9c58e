# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of the task 'lines': lines of one to three words to be read, letter by letter.

Lines differ in words, font, size, aspect, space around, contrast and noise. The fonts are those
that matplotlib ships (DejaVu, under the Bitstream Vera licence). Some lines to train on are letters
in any order. Lines of several words that are held out are not trained on, in any font; single words
are, or a model would learn that such words never stand alone.
"""

import zlib
from functools import cache
from pathlib import Path
from string import ascii_lowercase

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from omni_tasks import image_bytes

LENGTHS = (0.5, 0.3, 0.2)
"""Shares of the lines with one, two and three words; a model first learns from single words."""
LETTERS, LONGEST = 0.3, 3
"""Share of the lines to train on that are up to so many letters in any order. From words alone a
model learns to spell words, and long does not look."""
FONTS = ("Sans", "Sans-Bold", "Sans-Oblique", "SansMono", "Serif", "Serif-Bold")
SIZES = (12, 17)
"""Range of a font's size in pixels."""
STRETCH = 0.12
"""Largest relative stretch or shrinkage of a line's width."""
NOISE = 12
"""Largest deviation of a pixel's noise, of 255."""
HELD_OUT = 8
"""One in so many lines of several words is in the part that is held out."""
SPACE = "_"
VOCABULARY = (SPACE, *ascii_lowercase)
WORDS = np.array(
    """
    able acid age air angle animal arm army art baby back ball band bank base bath bee bell
    berry bird bit blood blow blue board boat bone book boot box boy brake brass bread brick
    broken brown bulb cake card cart cat chain cheese chest chin clean clear cloth cloud coal
    coat cold colour cook copy cord cork cough cover cow crack crime crush cup curve cut damage
    dark day dear death debt deep desk dog door doubt drain dress drop dry dust ear early east
    edge egg end engine error eye face fact fall false farm fat fear feet field fire fish fixed
    flag flame flight floor fly fold food foot fork form fowl frame free fruit full gate girl
    glass goat gold good grain grass green grey grip group guide hair hammer hand hard hat head
    heat help high hole hook horse hour house ice idea iron jelly jewel join judge keep key kick
    kind kiss knife knot land laugh law leaf leg letter level light limit lip list lock long
    loose love low map mark mass meal meat metal milk mind minute mist money moon mouth move
    muscle nail name neck nerve net night noise north nose note ocean office oil old oven owner
    pain paint paper part paste pig pin pipe place plane plate play point poison pot price pull
    pump push queen quick rail rain range rat ray rest rice ring river road roll roof root rule
    sail sand scale school sea seat seed shelf ship shirt shoe silk skirt sky sleep slip slow
    smoke snake snow soap sock son song soup south spade spring stage stamp star steam steel
    step stick stone stop store story sugar sun table tail tax test thread thumb tiger time toe
    tooth top touch town train tree trick turn valley view walk wall war warm wash water wave
    wax way week wheel whip white wide wind wing wire wood wool word world worm wound year
    yellow young
    """.split()
)


def sample(
    draw: np.random.Generator, held_out: bool, words: int = len(WORDS)
) -> tuple[dict[str, bytes], str, str]:
    """Draw the image of a line of one part, a question with its placeholder, and the answer.

    Args:
        held_out: whether the line is in the part that is held out.
        words: number of words that lines are made of.
    """
    known = WORDS[:: len(WORDS) // words][:words]
    count = 1 + int(draw.choice(len(LENGTHS), p=LENGTHS))
    if not held_out and draw.random() < LETTERS:
        text = "".join(draw.choice(list(ascii_lowercase), size=draw.integers(1, LONGEST + 1)))
    else:
        text = " ".join(draw.choice(known, size=count))
        while count > 1 and (zlib.crc32(text.encode()) % HELD_OUT == 0) != held_out:
            text = " ".join(draw.choice(known, size=count))
    spelled = " ".join(text.replace(" ", SPACE))
    return {"png": image_bytes(line_of(draw, text))}, "read <image>", spelled


def line_of(draw: np.random.Generator, text: str) -> Image.Image:
    """Draw a line of text, dark on light."""
    font = _font(str(draw.choice(FONTS)), int(draw.integers(*SIZES)))
    left, top, right, bottom = font.getbbox(text)
    before, after = draw.integers(1, 4, size=(2, 2))
    width, height = np.ceil([right - left, bottom - top]).astype(int) + before + after
    light, dark = draw.integers(190, 256), draw.integers(0, 80)
    image = Image.new("L", (int(width), int(height)), int(light))
    start = (before - [left, top]).tolist()
    ImageDraw.Draw(image).text(start, text, font=font, fill=int(dark))
    stretched = round(width * (1 + draw.uniform(-STRETCH, STRETCH)))
    pixels = np.asarray(image.resize((stretched, int(height))), float)
    pixels += draw.normal(0, draw.uniform(0, NOISE), pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(
        Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVu{name}.ttf"), size
    )
