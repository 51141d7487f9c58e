# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of the task 'lines': lines of one to three words to be read, letter by letter.

Lines differ in words, font, size, aspect, space around, contrast and noise. The fonts are those
that matplotlib ships (DejaVu, under the Bitstream Vera licence). Some lines to train on are letters
in any order. No line that is held out is trained on, in any font.
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
FONTS = [f"DejaVu{family}{style}" for family in ("Sans", "SansMono") for style in ("", "-Bold")]
FONTS += ["DejaVuSans-Oblique", "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Italic"]
SIZES = (9, 15)
"""Range of a font's size in pixels."""
STRETCH = 0.15
"""Largest relative stretch or shrinkage of a line's width."""
NOISE = 12
"""Largest deviation of a pixel's noise, of 255."""
HELD_OUT = 8
"""One in so many lines is in the part that is held out."""
SPACE = "_"
VOCABULARY = (SPACE, *ascii_lowercase)
WORDS = np.array(
    """
    able acid age air angle animal apple arm army art baby back bag ball band bank base bath bed
    bee bell berry bird bit blade blood blow blue board boat body bone book boot bottle box boy
    brain brake branch brass bread brick bridge broken brown brush bucket bulb button cake camera
    card cart cat cause chain cheese chest chin church circle clean clear clock cloth cloud coal
    coat cold collar colour comb cook copper copy cord cork cotton cough count cover cow crack
    credit crime crush cry cup curve cut damage danger dark day dead dear death debt deep degree
    desk dirty dog door doubt drain drawer dress drink drop dry dust ear early earth east edge egg
    end engine error event eye face fact fall false family far farm fat father fear feather feet
    field fight finger fire fish fixed flag flame flat flight floor flower fly fold food foot force
    fork form fowl frame free front fruit full garden gate girl glass glove goat gold good grain
    grass great green grey grip group growth guide gun hair hammer hand hard hat head heart heat
    help high hole hook horn horse hour house humour ice idea ink iron island jelly jewel join
    judge jump keep kettle key kick kind kiss knee knife knot land laugh law lead leaf leg letter
    level library light limit line lip liquid list lock long loose loud love low machine map mark
    market mass match meal meat metal middle milk mind mine minute mist money monkey moon morning
    mother motion mouth move muscle music nail name narrow neck needle nerve net new night noise
    north nose note number nut ocean office oil old orange oven owner page pain paint paper part
    paste pen pencil pig pin pipe place plane plant plate play pocket point poison pot potato
    powder price print prison pull pump push queen quick quiet rail rain range rat ray red rest
    rice ring river road rod roll roof root rule sail salt sand scale school sea seat seed sheep
    shelf ship shirt shoe silk silver sister skin skirt sky sleep slip slow smile smoke snake snow
    soap sock soft son song soup south spade sponge spoon spring square stage stamp star station
    steam steel stem step stick stone stop store storm story street sugar summer sun table tail
    taste tax test thread throat thumb ticket tiger time tin toe tongue tooth top touch town trade
    train tree trick turn valley vessel view voice walk wall war warm wash watch water wave wax way
    week wet wheel whip white wide wind window wine wing winter wire wood wool word work world
    worm wound year yellow young zebra
    """.split()
)


def sample(draw: np.random.Generator, held_out: bool) -> tuple[dict[str, bytes], str, str]:
    """Draw the image of a line of one part, a question with its placeholder, and the answer."""
    draw_text = _letters if not held_out and draw.random() < LETTERS else _words
    text = draw_text(draw)
    while (zlib.crc32(text.encode()) % HELD_OUT == 0) != held_out:
        text = draw_text(draw)
    spelled = " ".join(text.replace(" ", SPACE))
    return {"png": image_bytes(line_of(draw, text))}, "read <image>", spelled


def _words(draw: np.random.Generator) -> str:
    return " ".join(draw.choice(WORDS, size=1 + draw.choice(len(LENGTHS), p=LENGTHS)))


def _letters(draw: np.random.Generator) -> str:
    return "".join(draw.choice(list(ascii_lowercase), size=draw.integers(1, LONGEST + 1)))


def line_of(draw: np.random.Generator, text: str) -> Image.Image:
    """Draw a line of text, dark on light."""
    font = _font(str(draw.choice(FONTS)), int(draw.integers(*SIZES)))
    left, top, right, bottom = font.getbbox(text)
    before, after = draw.integers(1, 5, size=(2, 2))
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
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf"), size)
