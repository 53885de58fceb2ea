"""Fine-tune an encoder by a recipe, evaluate it, and export it as a bundle."""
