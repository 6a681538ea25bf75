"""Imported last by the server of tests/launch.py: what is there by then is no one's of a test.

The garbage collector passes over it from then on, and so do collections and a probe, which goes through all objects
there are; those that a test makes, its module's globals among them, come later.
"""

import gc

gc.collect()
gc.freeze()
