class RollbackAudit:
    def __init__(self, path):
        self.path, self.rows = path, []

    def add(self, trainer, **row):
        self.rows.append(row)

    def history(self):
        return str(self.rows)
