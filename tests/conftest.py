"""What all tests share. The core's tests run with this file too, so it imports nothing beyond pytest and hypothesis."""

from hypothesis import settings

# A busy two-core machine can be slow at any moment; pytest-timeout bounds a test as a whole.
settings.register_profile("pd_transfer", deadline=None, print_blob=True)
settings.load_profile("pd_transfer")
