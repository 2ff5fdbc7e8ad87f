"""Code without an event loop, as in Django: a view that stores a row and a job together.

The row and the job commit together or not at all. With Django the
connection is `django.db.connection`; here it is plain sqlite3.
"""

import asyncio
import sqlite3
import threading

from flowfabric import App

PATH = "shop.db"

app = App(f"sqlite:///{PATH}")


@app.task
def send_receipt(order_id: int) -> str:
    """A plain function: the worker runs it in a thread."""
    return f"receipt for order {order_id} sent"


def create_order(total_cents: int) -> int:
    """The view. Whatever fails in it, there is never an order without its receipt's job."""
    connection = sqlite3.connect(PATH)
    try:
        with connection:
            cursor = connection.execute("insert into orders (cents) values (?)", [total_cents])
            order_id = int(cursor.lastrowid or 0)
            app.blocking.submit(send_receipt, order_id, connection=connection)
            if total_cents <= 0:
                raise ValueError("an order costs something")
        return order_id
    finally:
        connection.close()


def main() -> None:
    # Any process may run the worker, usually another one: `flowfabric worker sync_views:app`.
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def work() -> None:
        async with app:
            ready.set()
            await app.run_worker(stop=stop, signals=False)

    worker = threading.Thread(target=loop.run_until_complete, args=[work()])
    worker.start()
    ready.wait()

    with sqlite3.connect(PATH) as connection:
        connection.execute("create table if not exists orders (id integer primary key, cents int)")
    connection.close()
    order_id = create_order(4_200)
    try:
        create_order(0)
    except ValueError as error:
        print(f"no order and no job: {error}")
    run = app.blocking.submit(send_receipt, order_id, idempotency_key=f"again-{order_id}")
    print(run.result(timeout=30))

    loop.call_soon_threadsafe(stop.set)
    worker.join()
    loop.close()
    app.blocking.close()


if __name__ == "__main__":
    main()
