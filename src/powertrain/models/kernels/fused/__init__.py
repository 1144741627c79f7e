"""Decoder blocks whose forward and backward passes are written by hand: the fast way through the same mathematics."""
