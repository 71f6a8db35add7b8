"""The mathematics: tensors in, tensors out. Imports torch and nothing else of the package."""
