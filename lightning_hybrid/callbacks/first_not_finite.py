class Found:
    pass


class FirstNotFinite:
    def __init__(self, trainer, pl_module):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass

    def found(self):
        return None
