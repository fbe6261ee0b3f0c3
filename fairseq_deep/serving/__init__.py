"""A translation server with LibreTranslate's API (``fairseq-deep serve``), on Starlette and uvicorn.

`batching.py` gathers requests into batches, `messages.py` checks requests, `app.py` answers them, and `server.py`
listens and stops.
"""
