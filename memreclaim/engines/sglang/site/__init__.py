"""The folder that ``memreclaim launch`` puts on ``PYTHONPATH``; it holds a ``sitecustomize``."""
