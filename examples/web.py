"""A web application that submits work and awaits it.

pip install starlette uvicorn
uvicorn web:web                   serves it, with a worker in the same process
curl -X POST localhost:8000/greet -d '{"name": "Ada"}'
curl localhost:8000/runs/<id>
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from flowfabric import App
from flowfabric.errors import InvalidInput, NotFound, OperationTimeout

app = App("sqlite:///web.db")


@app.task
async def greet(name: str) -> str:
    await asyncio.sleep(0.05)
    return f"Hello, {name}!"


async def post_greeting(request: Request) -> JSONResponse:
    """Submit; answer with the result if it comes soon, else with where to ask for it."""
    body = await request.json()
    run = await app.submit(greet, str(body["name"]), tags={"web.path": "greet"})
    try:
        return JSONResponse({"result": await run.result(timeout="2s")})
    except OperationTimeout:
        return JSONResponse({"run": run.execution_id}, status_code=202)


async def get_run(request: Request) -> JSONResponse:
    try:
        run = app.run(greet, request.path_params["execution_id"])
        explanation = await run.why()
    except (InvalidInput, NotFound) as error:
        return JSONResponse({"detail": str(error)}, status_code=404)
    return JSONResponse({"state": explanation.public_state, "why": explanation.sentence})


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with app:
        worker = asyncio.create_task(app.run_worker(stop=stop, signals=False))
        yield
        stop.set()
        await worker


web = Starlette(
    routes=[
        Route("/greet", post_greeting, methods=["POST"]),
        Route("/runs/{execution_id:path}", get_run),
    ],
    lifespan=lifespan,
)
