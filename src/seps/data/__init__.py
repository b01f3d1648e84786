"""Data: readers of the layouts in use, the built-in scenes, augmentation of images and words, loading."""
