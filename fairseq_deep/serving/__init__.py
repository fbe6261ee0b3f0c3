"""A translation server with LibreTranslate's API (``fairseq-deep serve``), on Starlette and uvicorn.

`batching.py` combines requests into batches, `messages.py` checks requests, `app.py` answers them, and `server.py`
starts and stops the server.
"""
