def draw(rows, path):
    pass
