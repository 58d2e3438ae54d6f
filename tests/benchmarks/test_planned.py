"""Recipes for a card: each composes, and fits the card by its plan."""

import planned
import pytest


@pytest.mark.parametrize("recipe", planned.RECIPES)
def test_a_recipe_fits_its_card(recipe, tmp_path):
    planner = planned.planner_of(recipe, str(tmp_path))
    row = planner.row(planner.cache)
    assert row.fits
    assert row.n_rows == planner.cfg.rollout.max_rows
    assert planner.cfg.model.path == str(tmp_path)
