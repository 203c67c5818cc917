"""Training loops of every form that otel-dl must understand, each with the truth about itself.

A form is a generator. It makes what a script makes first (model, optimizer, loader), yields its models, and trains when
it is resumed. Meanwhile it writes a `Diary`: each step's phases and loss, as the script knows them. Nothing of otel-dl
is asked. Everything is small, and drawn from the global generators, which `seed` sets.
"""

from support.loops import evaluation, explicit, failures, loaders, no_loader, one_optimizer, several_optimizers
from support.loops.base import FORMS, LONG, Diary, Form, Points, batch, loader, network, seed, sgd, train, update
from support.loops.failures import Picky

__all__ = [
    "FORMS",
    "LONG",
    "Diary",
    "Form",
    "Picky",
    "Points",
    "batch",
    "evaluation",
    "explicit",
    "failures",
    "loader",
    "loaders",
    "network",
    "no_loader",
    "one_optimizer",
    "seed",
    "several_optimizers",
    "sgd",
    "train",
    "update",
]
