"""Recipes: plain, linear scripts. ``train.py`` composes the configuration once and hands it to one of them."""
