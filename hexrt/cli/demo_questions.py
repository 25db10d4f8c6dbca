"""What the demo's agents are asked: a question that the corpus answers, and a sum for a small program.

`fixed` is the program that is run in any case: it computes the sum, looks at how the model's own program went, and says which of
the two gave the result.
"""

from __future__ import annotations

from dataclasses import dataclass

_JUDGE = """
import json, re, sys
trial = json.load(sys.stdin)
printed = trial["stdout"]
numbers = [float(n.replace(",", "")) for n in re.findall(r"-?\\d[\\d,]*(?:\\.\\d+)?", printed)]
agrees = any(abs(n - result) <= 0.001 * abs(result) for n in numbers)
if trial["exit_code"] != 0:
    last = (trial["stderr"].strip().splitlines() or ["exit code %s" % trial["exit_code"]])[-1]
    by, why = "fixed", "the model's did not run: " + last[:80]
elif agrees:
    by, why = "model", "the model's ran and is right"
elif printed.strip():
    by, why = "fixed", "the model's ran but printed " + repr(printed.strip()[:40])
else:
    by, why = "fixed", "the model's ran but printed nothing"
print(f"{result:,.10g}")
print(json.dumps({"by": by, "why": why}))
"""


@dataclass(frozen=True, slots=True)
class Question:
    """`title` is the document that should be found; `task` and `unit` speak of the sum, `expression` is its right form."""

    title: str
    text: str
    task: str
    unit: str
    expression: str

    @property
    def fixed(self) -> str:
        return f"import datetime\nresult = {self.expression}\n{_JUDGE}"


QUESTIONS = (
    Question("Mount Everest", "How tall is Mount Everest?", "8848.86 metres in feet, where a metre is 3.28084 feet", "feet", "8848.86 * 3.28084"),
    Question("Chess", "How many pieces does each chess player control?", "2**64 - 1", "grains on the board", "2**64 - 1"),
    Question("Eiffel Tower", "Who designed and built the Eiffel Tower?", "the days from 28 January 1887 to 31 March 1889", "days to build it", "(datetime.date(1889, 3, 31) - datetime.date(1887, 1, 28)).days"),
    Question("Photosynthesis", "What does photosynthesis convert light energy into?", "6 * 12.011 + 12 * 1.008 + 6 * 15.999", "grams a mole of glucose", "6 * 12.011 + 12 * 1.008 + 6 * 15.999"),
    Question("Penicillin", "What are penicillins obtained from?", "the bacteria there are after 10 hours when one bacterium doubles every 20 minutes", "bacteria", "2**30"),
    Question("Volcano", "Where are most volcanoes found?", "3000 kilometres in miles, where a kilometre is 0.621371 miles", "miles", "3000 * 0.621371"),
    Question("Telescope", "What is a telescope used for?", "149597870.7 / 299792.458", "seconds from the Sun", "149597870.7 / 299792.458"),
    Question("Marie Curie", "Which Nobel Prizes did Marie Curie win?", "1911 - 1903", "years between the prizes", "1911 - 1903"),
    Question("Octopus", "How many limbs does an octopus have?", "the sum of the numbers from 1 to 64", "", "sum(range(1, 65))"),
    Question("Vaccine", "What does a vaccine contain?", "1 - 1 / 15 as a percentage", "percent immune", "100 * (1 - 1 / 15)"),
    Question("Great Wall of China", "Which dynasty built the best-known parts of the Great Wall of China?", "21196 kilometres divided by 40 kilometres a day", "days on foot", "21196 / 40"),
    Question("Coffee", "What is coffee brewed from?", "70 cups of 95 milligrams in grams", "grams of caffeine", "70 * 95 / 1000"),
)  # fmt: skip
