"""Use trained weights: sample, compare with the base, export, try in a page. Import from the modules."""
