"""Configurations of BERT by name and settings, for all tests of it."""

from common.training.load import load_config


def config_of(name, *settings, size="full"):
    return load_config("language_bert", name, size=size, settings=[*map(str, settings)]).config


def mini(name, *settings):
    return config_of(name, *settings, size="mini")
