"""Images and masks in numpy and Pillow: reading, fitting, composites, text lines and letters. No torch."""
