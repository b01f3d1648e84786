"""`make demo`: search photographs, train on drawn scenes, serve the page; in minutes, without a download."""
