"""Clouds taken out of Sentinel-2 images with the help of Sentinel-1 radar (after GLF-CR): train, predict."""
