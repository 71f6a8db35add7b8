"""DiffusionNFT."""
