"""The price of an hour of a machine: dated rows from one YAML file, and a person's own machine."""

import datetime
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common import yaml_file
from common.config.schema import Strict
from common.config.validation import validate
from common.errors import UserError, nearest

PRICES = Path(__file__).with_name("prices.yaml")
STATED = re.compile(r"(own=)?([0-9]+(?:\.[0-9]+)?)")  # --price own=0.12, --price 2

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Text = Annotated[str, Field(min_length=1, max_length=300)]
Dollars = Annotated[float, Field(gt=0)]


class Price(Strict):
    """Dollars for an hour of a whole machine with `num_devices`; `device` is a part of a hardware's name."""

    name: Name
    cloud: Name
    region: Text
    instance: Name
    device: Name
    num_devices: int = Field(ge=1, le=1024)
    on_demand: Dollars
    spot: Dollars | None
    date: str = Field(pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01]))?$")
    source: Text

    def is_of(self, hardware: str) -> bool:
        """Return whether a hardware such as `1xH200` consists of such devices; a stated price is of any."""
        if self.cloud in ("own", "any"):
            return True
        words = re.split(r"[^A-Za-z0-9]|(?<=\d)x", hardware)
        model, _, memory = self.device.partition("-")
        stated = [word for word in words if word.endswith("GB")]
        return model in words and (not memory or not stated or memory in stated)

    def cost(
        self, minutes: float, num_devices: int, *, num_machines: int = 1, spot: bool = False
    ) -> float | None:
        """Return the dollars of devices for some minutes; None without a spot price.

        Devices cost their share of a machine; own machines cost a whole one.
        """
        per_hour = self.spot if spot else self.on_demand
        share = num_machines if self.cloud == "own" else num_devices / self.num_devices
        return None if per_hour is None else minutes / 60 * share * per_hour


class Prices(Strict):
    prices: list[Price] = Field(min_length=1)


def load_prices(path: Path = PRICES) -> list[Price]:
    """Return the rows of a file. Raises UserError with file:line for the first fault."""
    try:
        document = yaml_file.parse(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"no prices here ({error})", where=str(path)) from error
    rows = validate(Prices, document.values, document.origins).prices
    names: set[str] = set()
    for number, row in enumerate(rows):
        if row.name in names:
            where = document.origins["prices", str(number), "name"]
            raise UserError(f"'{row.name}' is the name of another row too", where=where)
        names.add(row.name)
    return rows


def stated_price(dollars: float, *, is_machine: bool) -> Price:
    """Return a price that a person states: of an hour of an own machine as a whole, or of any device."""
    name = "own" if is_machine else "any"
    return Price(
        name=name,
        cloud=name,
        region="stated",
        instance=name,
        device="any",
        num_devices=1,
        on_demand=dollars,
        spot=None,
        date=datetime.date.today().isoformat(),
        source="--price, as stated",
    )


def choose_prices(rows: list[Price], names: list[str]) -> list[Price]:
    """Return the rows of these names, with `own=0.12` and `2` as stated; all rows where none is named."""
    known = {row.name: row for row in rows}
    chosen = []
    for name in names:
        if (stated := STATED.fullmatch(name)) and float(stated[2]) > 0:
            chosen.append(stated_price(float(stated[2]), is_machine=bool(stated[1])))
        elif name in known:
            chosen.append(known[name])
        else:
            hint = f"{nearest(name, known)}, own=DOLLARS an hour, or DOLLARS of a device"
            raise UserError(f"no price is called '{name}'", where="--price", hint=hint)
    return chosen or rows
