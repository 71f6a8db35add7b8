"""Use trained weights: sample, compare with the base, export, try in a browser. Import from the modules."""
