"""An agent that writes its answer into a web page, word by word, and survives its worker.

    pip install starlette uvicorn
    uvicorn live:web       the page, at http://localhost:8000
    python live.py         a worker: kill it with -9 while it answers, and start another

The browser keeps the cursor of the last word it has seen, and continues after it when it
reconnects. When another attempt starts over, it takes back what no longer counts: not the outline,
which is the work of a finished step.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowfabric import App, Context, Frame, WorkerSettings
from flowfabric.errors import NotFound

app = App(os.environ.get("FLOWFABRIC_URL", "sqlite:///live.db"))

WORD_S: Final = float(os.environ.get("WORD_S", "0.1"))

PAGE: Final = """<!doctype html><title>live</title>
<form><input name="question" autofocus> <button>ask</button></form><p id="answer"></p>
<script>
const answer = document.getElementById("answer")
document.forms[0].onsubmit = async (event) => {
  event.preventDefault()
  const body = JSON.stringify({question: event.target.question.value})
  const {run} = await (await fetch("/ask", {method: "POST", body})).json()
  answer.replaceChildren()
  const source = new EventSource("/runs/" + run + "/words")
  source.onmessage = (event) => {
    const {text, attempt, step} = JSON.parse(event.data)
    const word = Object.assign(document.createElement("span"), {textContent: text})
    Object.assign(word.dataset, {attempt, step: step ?? ""})
    answer.append(word)
  }
  source.addEventListener("superseded", (event) => {
    const {attempt, kept_steps} = JSON.parse(event.data)
    for (const word of [...answer.children]) {
      const said = Number(word.dataset.attempt)
      if (said < attempt && kept_steps[word.dataset.step] !== said) word.remove()
    }
  })
  source.addEventListener("end", () => source.close())
}
</script>"""


async def model(question: str, words: int) -> AsyncIterator[str]:
    """In place of a model: call yours here."""
    for number in range(words):
        await asyncio.sleep(WORD_S)
        yield f"{question}-{number} "


async def outline(ctx: Context, question: str) -> None:
    async for word in model(f"outline of {question}", 3):
        await ctx.emit(word)


@app.task
async def answer(ctx: Context, question: str) -> str:
    await ctx.step("outline", outline, ctx, question)
    text = ""
    async for word in model(question, 20):
        await ctx.emit(word)
        text += word
    return text


# The web


async def page(request: Request) -> HTMLResponse:
    return HTMLResponse(PAGE)


async def ask(request: Request) -> JSONResponse:
    run = await app.submit(answer, str((await request.json())["question"]))
    return JSONResponse({"run": run.execution_id})


async def words(request: Request) -> Response:
    """What a run says, as server-sent events; a browser that gets 204 does not come back."""
    run = app.run(answer, request.path_params["execution_id"])
    try:
        await run.snapshot()
    except NotFound:
        return Response(status_code=204)
    after = request.headers.get("Last-Event-ID", "start")

    async def events() -> AsyncIterator[str]:
        async for frame in run.stream(after=after):
            yield event_of(frame)
        yield "event: end\ndata:\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def event_of(frame: Frame) -> str:
    data: dict[str, object] = {"text": frame.text, "attempt": frame.attempt, "step": frame.step}
    kind = "message"
    if frame.take_over is not None:
        kind = frame.kind
        data["kept_steps"] = dict(frame.take_over.kept_steps)
    return f"id: {frame.cursor}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with app:
        yield


web = Starlette(
    routes=[
        Route("/", page),
        Route("/ask", ask, methods=["POST"]),
        Route("/runs/{execution_id}/words", words),
    ],
    lifespan=lifespan,
)


if __name__ == "__main__":
    # A short lease: another worker takes over soon after this one is killed.
    asyncio.run(app.run_worker(settings=WorkerSettings(lanes=app.lanes(), lease_ttl="2s")))
