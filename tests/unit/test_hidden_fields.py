"""Secrets in Pydantic models are found wherever they are, unless the program writes them out."""

from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import pydantic
import pytest
from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from typing_extensions import TypedDict

from flowfabric.errors import InvalidInput
from flowfabric.json_values import check_storable, encode_value, hidden_field, read_as

T = TypeVar("T")


class Login(BaseModel):
    name: str
    password: SecretStr


class Key(BaseModel):
    data: SecretBytes | None = None


class Inside(BaseModel):
    logins: dict[str, list[Login]]


class Pin(BaseModel):
    number: Secret[int]


class Own(SecretStr):
    pass


class OwnSecret(BaseModel):
    value: Own


class Box(BaseModel, Generic[T]):
    content: T


class Typed(TypedDict):
    password: SecretStr


class WithTyped(BaseModel):
    typed: Typed


@pydantic.dataclasses.dataclass
class Data:
    password: SecretStr


class WithData(BaseModel):
    data: tuple[Data, int]


class Tree(BaseModel):
    password: SecretStr | None = None
    branches: "list[Tree]" = []


class Rooted(pydantic.RootModel[list[SecretStr]]):
    pass


HIDDEN = [
    (Login, "Login.password"),
    (Key, "Key.data"),
    (Inside, "Login.password"),
    (Pin, "Pin.number"),
    (OwnSecret, "OwnSecret.value"),
    (Box[SecretStr], "Box[SecretStr].content"),
    (Box[list[Login]], "Login.password"),
    (WithTyped, "WithTyped.typed.password"),
    (WithData, "WithData.data.password"),
    (Tree, "Tree.password"),
    (Rooted, "Rooted"),
]


@pytest.mark.parametrize(("model", "place"), HIDDEN)
def test_a_secret_is_named_wherever_it_is(model: type, place: str) -> None:
    assert hidden_field(model) == place


def revealed(value: SecretStr) -> str:
    return value.get_secret_value()


class ByField(BaseModel):
    password: SecretStr
    _written = pydantic.field_serializer("password", when_used="json")(revealed)


class ByType(BaseModel):
    passwords: list[Annotated[SecretStr, pydantic.PlainSerializer(revealed)]]


class ByModel(BaseModel):
    password: SecretStr

    @pydantic.model_serializer
    def written(self) -> dict[str, str]:
        return {"password": revealed(self.password)}


@pytest.mark.parametrize(
    "value",
    [
        ByField(password=SecretStr("s")),
        ByType(passwords=[SecretStr("s")]),
        ByModel(password=SecretStr("s")),
        Box(content=1),
    ],
)
def test_what_the_program_writes_out_comes_back_as_it_was(value: BaseModel) -> None:
    check_storable("it", type(value))
    assert read_as(encode_value("it", value), type(value)) == value


@dataclass
class Holder:
    logins: list[Login]


@pytest.mark.parametrize("kind", [Login, list[Login], Holder, Login | None])
def test_an_annotation_with_a_secret_inside_is_refused(kind: object) -> None:
    with pytest.raises(InvalidInput, match=r"Login\.password is a secret") as refused:
        check_storable("argument login of sign_in", kind)
    assert refused.value.field == "argument login of sign_in"


def test_a_secret_is_refused_where_no_annotation_tells_of_it() -> None:
    with pytest.raises(InvalidInput, match=r"Login\.password is a secret"):
        encode_value("payload", {"login": Login(name="ada", password=SecretStr("s"))})


def test_a_model_that_is_not_complete_yet_is_looked_at_again() -> None:
    class Late(BaseModel):
        later: "Later"

    assert hidden_field(Late) is None

    class Later(BaseModel):
        password: SecretStr

    Late.model_rebuild()
    assert hidden_field(Late) == "Later.password"
