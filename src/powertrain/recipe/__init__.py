"""What the user wants: typed and strict, every value with its origin. It is semantics, and never traded for speed."""

from powertrain.recipe.resolve import Resolved, find_recipe, flat, quoted, read_yaml, resolve, resolve_words, shipped_recipes
from powertrain.recipe.schema import DataRecipe, ModelRecipe, Recipe, SampleRecipe, in_steps

__all__ = ["DataRecipe", "ModelRecipe", "Recipe", "Resolved", "SampleRecipe", "find_recipe", "flat", "in_steps", "quoted",
           "read_yaml", "resolve", "resolve_words", "shipped_recipes"]
