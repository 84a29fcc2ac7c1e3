"""What a path holds, whatever its layout: tables, and their rows a batch at a time.

``find.open_content`` recognises a path; ``base`` is what all layouts have in common.
"""
