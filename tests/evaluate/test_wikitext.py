"""Tests that WikiText's tokenized text becomes natural text; test_harness.py compares with the harness' own rules."""

from support.each import each

from megazero.evaluate.wikitext import natural_text


@each(
    ("given", "expected"),
    [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        ("\n = = Career = = \n \n = = = 2000 to 2005 = = = \n", "\n== Career ==\n\n=== 2000 to 2005 ===\n"),
        (
            "a guest @-@ starring role , in 1 @,@ 500 or 3 @.@ 5 places .",
            "a guest-starring role, in 1,500 or 3.5 places .",
        ),
        ('He said : " it is ( not ) so " ; why ? Yes ! ', 'He said: "it is (not) so"; why? Yes! '),
        ("Boulter 's wives ' [ sic ] { x }", "Boulter's wives' [sic] {x}"),
        ("at 5 ° C of it", "at 5°C of it"),
        ("at N of it", "at 1 of it"),
        ("", ""),
    ],
)
def test_marks_and_blanks_go(given: str, expected: str) -> None:
    assert natural_text(given) == expected
