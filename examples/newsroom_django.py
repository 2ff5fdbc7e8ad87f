"""A newsroom on Django: an article is written, approved and published.

    python newsroom_django.py                   makes the table, once
    uvicorn newsroom_django:web                 the pages, at http://localhost:8000
    flowfabric worker newsroom_django:app       a worker

- `POST /articles` stores the article and the job that writes it in one transaction.
- `GET /articles/ID/words` shows the text while it is written, as server-sent events.
- The editor gets a link and decides there. The link is all he needs.

Kill any of them while it runs: what is started again continues. All of it is in one file, for show;
in a project of yours the settings, models, tasks and views are where they always are.
"""

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.db import connection, models, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.http import require_POST

from flowfabric import App, Context, Frame
from flowfabric.core.signals import SignalDuplicate
from flowfabric.errors import FlowFabricError

URL: Final = os.environ.get("FLOWFABRIC_URL", "sqlite:///newsroom.db")
OUTBOX: Final = Path(os.environ.get("OUTBOX", "outbox.log"))
WORD_S: Final = float(os.environ.get("WORD_S", "0.1"))
OPEN_MAX: Final = 10


def database() -> dict[str, object]:
    """The same database in Django's words."""
    if URL.startswith("sqlite:"):
        # A transaction that reads before it writes says so when it begins.
        options = {"transaction_mode": "IMMEDIATE"}
        name = URL.removeprefix("sqlite:///")
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options}
    parts = urlsplit(URL)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.removeprefix("/"),
        "HOST": parts.hostname,
        "PORT": parts.port,
        "USER": parts.username,
        "PASSWORD": parts.password,
    }


settings.configure(
    DATABASES={"default": database()},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
)
django.setup()
app = App(URL)


class Article(models.Model):
    topic = models.TextField()
    text = models.TextField(default="")
    state = models.TextField(default="written")

    class Meta:
        app_label = "newsroom"


# The job


def draft(ctx: Context, topic: str) -> str:
    """In place of a model: call yours here."""
    text = ""
    for number in range(20):
        time.sleep(WORD_S)
        word = f"{topic}-{number} "
        ctx.blocking.emit(word)
        text += word
    return text


def mail(link: str) -> None:
    """In place of a mail to the editor."""
    with OUTBOX.open("a") as file:
        file.write(f"{link}\n")


@app.task
def write(ctx: Context, article_id: int, topic: str) -> str:
    """A plain function, as Django's models want it: the worker runs it in a thread."""
    text = ctx.blocking.step("draft", draft, ctx, topic)
    token = ctx.blocking.waitpoint("decided")
    ctx.blocking.step("mail", mail, f"/decide/{token.reveal()}")
    decision = ctx.blocking.wait_for_signal("decided", type=str, timeout="7d")
    # Only while this worker owns the run, and together with nothing or all of it.
    with transaction.atomic(), ctx.fence(connection):
        Article.objects.filter(pk=article_id).update(text=text, state=decision.payload)
    connection.close()
    return decision.payload


# The web


@require_POST
def create(request: HttpRequest) -> HttpResponse:
    """The article and its job: both or none of them."""
    with transaction.atomic():
        article = Article.objects.create(topic=request.POST["topic"])
        job = write(article.pk, article.topic)
        app.blocking.submit(job, execution_id=f"article-{article.pk}", connection=connection)
        if Article.objects.filter(state="written").count() > OPEN_MAX:
            transaction.set_rollback(True)
            told = f"{OPEN_MAX} articles are being written; come back later"
            return JsonResponse({"detail": told}, status=409)
    return JsonResponse({"article": article.pk}, status=201)


def read(request: HttpRequest, article_id: int) -> HttpResponse:
    article = Article.objects.filter(pk=article_id).first()
    if article is None:
        return JsonResponse({"detail": f"there is no article {article_id}"}, status=404)
    return JsonResponse({"topic": article.topic, "text": article.text, "state": article.state})


async def words(request: HttpRequest, article_id: int) -> StreamingHttpResponse:
    """What is written, as it is. A browser that reconnects continues after the last word it has."""
    await app.open()
    run = app.run(write, f"article-{article_id}")
    after = request.headers.get("Last-Event-ID", "start")

    async def events() -> AsyncIterator[str]:
        async for frame in run.stream(after=after):
            yield event_of(frame)
        yield "event: end\ndata:\n\n"

    return StreamingHttpResponse(events(), content_type="text/event-stream")


def event_of(frame: Frame) -> str:
    """A word; or that another attempt takes over, and which words a page takes back then."""
    data: dict[str, object] = {"text": frame.text, "attempt": frame.attempt, "step": frame.step}
    if frame.take_over is not None:
        data["kept_steps"] = dict(frame.take_over.kept_steps)
    kind = frame.kind if frame.is_turn else "message"
    return f"id: {frame.cursor}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"


def decide(request: HttpRequest, token: str) -> HttpResponse:
    """The token alone says what is decided; a wrong one reveals nothing."""
    if request.method != "POST":
        # Nothing is decided by looking: programs that check mails for viruses follow links, too.
        names = ("approved", "rejected")
        buttons = "".join(f"<button name=decision>{each}</button>" for each in names)
        return HttpResponse(f"<!doctype html><form method=post>{buttons}</form>")
    decision = request.POST["decision"]
    try:
        told = app.blocking.signals.deliver(token, "decided", decision, idempotency_key="link")
    except FlowFabricError as error:
        return JsonResponse({"detail": str(error)}, status=error.http_status)
    # Of two clicks the first counts.
    return JsonResponse({"decision": decision, "counts": not isinstance(told, SignalDuplicate)})


urlpatterns = [
    path("articles", create),
    path("articles/<int:article_id>", read),
    path("articles/<int:article_id>/words", words),
    path("decide/<str:token>", decide),
]


web = get_asgi_application()


if __name__ == "__main__":
    with connection.schema_editor() as editor:
        if Article._meta.db_table not in connection.introspection.table_names():
            editor.create_model(Article)
