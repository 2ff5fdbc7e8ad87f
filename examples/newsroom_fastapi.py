"""A newsroom on FastAPI and SQLAlchemy: an article is written, approved and published.

    uvicorn newsroom_fastapi:web                 the pages, at http://localhost:8000/docs
    flowfabric worker newsroom_fastapi:app       a worker

- `POST /articles` stores the article and the job that writes it in one transaction.
- `GET /articles/ID/words` shows the text while it is written, as server-sent events.
- The editor gets a link and decides there. The link is all he needs.

Kill any of them while it runs: what is started again continues.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final

from fastapi import FastAPI, Form, Header, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flowfabric import App, Context, Frame
from flowfabric.core.signals import SignalDuplicate
from flowfabric.errors import FlowFabricError

URL: Final = os.environ.get("FLOWFABRIC_URL", "sqlite:///newsroom.db")
OUTBOX: Final = Path(os.environ.get("OUTBOX", "outbox.log"))
WORD_S: Final = float(os.environ.get("WORD_S", "0.1"))
OPEN_MAX: Final = 10

DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
scheme, _, rest = URL.partition(":")
database = create_async_engine(f"{DRIVERS[scheme]}:{rest}")
sessions = async_sessionmaker(database, expire_on_commit=False)
app = App(URL)


class Base(DeclarativeBase):
    """The newsroom's own tables, in the same database."""


class Article(Base):
    __tablename__ = "article"

    id: Mapped[int] = mapped_column(primary_key=True)
    topic: Mapped[str]
    text: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(default="written")


# The job


async def model(topic: str) -> AsyncIterator[str]:
    """In place of a model: call yours here."""
    for number in range(20):
        await asyncio.sleep(WORD_S)
        yield f"{topic}-{number} "


async def draft(ctx: Context, topic: str) -> str:
    text = ""
    async for word in model(topic):
        await ctx.emit(word)
        text += word
    return text


def mail(link: str) -> None:
    """In place of a mail to the editor."""
    with OUTBOX.open("a") as file:
        file.write(f"{link}\n")


@app.task
async def write(ctx: Context, article_id: int, topic: str) -> str:
    text = await ctx.step("draft", draft, ctx, topic)
    token = await ctx.waitpoint("decided")
    await ctx.step("mail", mail, f"/decide/{token.reveal()}")
    decision = await ctx.wait_for_signal("decided", type=str, timeout="7d")
    # Only while this worker owns the run, and together with nothing or all of it.
    async with sessions() as session, session.begin(), ctx.fence(session):
        change = update(Article).where(Article.id == article_id)
        await session.execute(change.values(text=text, state=decision.payload))
    return decision.payload


# The web


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with app:
        async with sessions() as session, session.begin():
            await (await session.connection()).run_sync(Base.metadata.create_all)
        yield


web = FastAPI(title="Newsroom", lifespan=lifespan)


@web.post("/articles", status_code=201)
async def create(topic: Annotated[str, Form()]) -> dict[str, int]:
    """The article and its job: both or none of them."""
    async with sessions() as session, session.begin():
        article = Article(topic=topic)
        session.add(article)
        await session.flush()
        job = write(article.id, topic)
        await app.submit(job, execution_id=f"article-{article.id}", connection=session)
        open_now = select(func.count()).where(Article.state == "written")
        if (await session.scalar(open_now) or 0) > OPEN_MAX:
            raise HTTPException(409, f"{OPEN_MAX} articles are being written; come back later")
    return {"article": article.id}


@web.get("/articles/{article_id}")
async def read(article_id: int) -> dict[str, str]:
    async with sessions() as session:
        article = await session.get(Article, article_id)
    if article is None:
        raise HTTPException(404, f"there is no article {article_id}")
    return {"topic": article.topic, "text": article.text, "state": article.state}


@web.get("/articles/{article_id}/words")
async def words(
    article_id: int, last_event_id: Annotated[str, Header()] = "start"
) -> StreamingResponse:
    """What is written, as it is. A browser that reconnects continues after the last word it has."""
    run = app.run(write, f"article-{article_id}")

    async def events() -> AsyncIterator[str]:
        async for frame in run.stream(after=last_event_id):
            yield event_of(frame)
        yield "event: end\ndata:\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def event_of(frame: Frame) -> str:
    """A word; or that another attempt takes over, and which words a page takes back then."""
    data: dict[str, object] = {"text": frame.text, "attempt": frame.attempt, "step": frame.step}
    if frame.take_over is not None:
        data["kept_steps"] = dict(frame.take_over.kept_steps)
    kind = frame.kind if frame.is_turn else "message"
    return f"id: {frame.cursor}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"


@web.get("/decide/{token}", response_class=HTMLResponse)
async def ask(token: str) -> str:
    """Nothing is decided by looking: programs that check mails for viruses follow links, too."""
    buttons = "".join(f"<button name=decision>{each}</button>" for each in ("approved", "rejected"))
    return f"<!doctype html><form method=post>{buttons}</form>"


@web.post("/decide/{token}")
async def decide(token: str, decision: Annotated[str, Form()]) -> dict[str, str | bool]:
    """The token alone says what is decided; a wrong one reveals nothing."""
    try:
        told = await app.signals.deliver(token, "decided", decision, idempotency_key="link")
    except FlowFabricError as error:
        raise HTTPException(error.http_status, str(error)) from error
    # Of two clicks the first counts.
    return {"decision": decision, "counts": not isinstance(told, SignalDuplicate)}
