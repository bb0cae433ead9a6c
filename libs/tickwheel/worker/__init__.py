"""The worker SDK: register handlers, take runs from a cluster, give their outcomes back.

from tickwheel.worker import Abort, Context, Retry, Worker

worker = Worker("127.0.0.1:7600")

@worker.handler("send-email")
async def send_email(ctx: Context) -> None:
    await mailer.send(ctx.payload["to"], idempotency_key=ctx.idempotency_key)

worker.run()
"""

from tickwheel.worker.context import BaseContext, Cancelled, Context, SyncContext
from tickwheel.worker.handlers import Abort, Release, Retry
from tickwheel.worker.worker import Worker

__all__ = ["Abort", "BaseContext", "Cancelled", "Context", "Release", "Retry", "SyncContext", "Worker"]
