# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner: predicts memory and step time of layouts, and finds the fastest that fits.

- ``plan`` reads the command line: the images and sounds of the data, and the optimizer's types.
- ``parameters`` counts what a rank holds, ``layers`` the work and activations of a layer.
- ``memory`` is state + activations × microbatches in flight, for each pipeline stage.
- ``step_time`` is one formula; ``machine`` says how long work and collectives take.
- ``search`` orders the layouts that the program's rules allow; ``report`` answers.

Nothing is started, and no device is used.
"""
