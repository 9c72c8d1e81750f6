"""The page in a real browser."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.explorer.conftest import Visit
from tests.explorer.models import TEXT, small_explorer
from tests.explorer.serving import Server
from tests.explorer.test_server import HOSTILE


def open_page(page: Page, server: Server, text: str = TEXT, settings: str = "") -> Locator:
    """The page with a text in its address, once it shows its first panel's chosen token."""
    page.goto(f"{server.address}#{settings}&text={quote(text)}")
    return settled(page)


def settled(page: Page, number: int = 0) -> Locator:
    """A panel that waits for nothing."""
    panel = page.locator(".panel").nth(number)
    expect(panel).to_have_attribute("aria-busy", "false")
    expect(panel.locator(".details")).to_be_visible()
    return panel


def tokens(panel: Locator) -> Locator:
    return panel.locator(".tokens").get_by_role("option")


def test_loads_and_shows_every_token_with_its_gate(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    assert "".join(tokens(panel).all_text_contents()) == TEXT
    classes = tokens(panel).evaluate_all("spans => spans.map(span => span.className)")
    assert all("shade-silent" in one for one in classes[:5])  # a window of 5: no gate decides anything yet
    assert all("shade-gate-" in one for one in classes[5:])
    assert visit.complaints == []


def test_nothing_is_asked_of_anyone_but_the_server(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    tokens(panel).nth(7).click()
    settled(visit.page)
    assert len(visit.requests) > 5
    assert [url for url in visit.requests if not url.startswith(f"http://127.0.0.1:{gated.port}/")] == []


def test_text_is_never_in_an_address_that_is_sent(visit: Visit, gated: Server) -> None:
    open_page(visit.page, gated, "a secret word")
    assert "secret" in visit.page.url
    assert [url for url in visit.requests if "secret" in url.partition("#")[0]] == []


def test_typing_reads_the_new_text(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    visit.page.get_by_label("Text", exact=True).fill("The people of the town")
    expect(panel.locator(".chosen")).to_contain_text("town")
    assert "".join(tokens(panel).all_text_contents()) == "The people of the town"
    assert visit.complaints == []


def test_emptied_text_empties_the_page_and_typing_fills_it_again(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    field = visit.page.get_by_label("Text", exact=True)
    field.fill("")
    expect(tokens(panel)).to_have_count(0)
    expect(panel.locator(".details")).to_be_hidden()
    field.fill("The town")
    expect(panel.locator(".chosen")).to_contain_text("town")
    assert visit.complaints == []


def test_hovering_shows_the_numbers_of_a_token(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    tokens(panel).nth(8).hover()
    hint = visit.page.locator("#hint")
    expect(hint).to_be_visible()
    expect(hint).to_contain_text(re.compile(r"token 8.*gate 0\.\d\d.*window 5 keys", re.DOTALL))


def test_keyboard_reaches_every_token_and_chooses_one(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    tokens(panel).first.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        visit.page.keyboard.press(key)
    expect(tokens(panel).nth(2)).to_be_focused()
    expect(visit.page.locator("#hint")).to_contain_text("token 2")
    visit.page.keyboard.press("Enter")
    expect(panel.locator(".chosen")).to_contain_text("Token 2:")
    expect(tokens(panel).nth(2)).to_have_attribute("aria-selected", "true")
    expect(tokens(panel).nth(2)).to_be_focused()


def test_one_token_alone_is_in_the_order_of_the_tab_key(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    assert tokens(panel).evaluate_all("spans => spans.filter(span => span.tabIndex === 0).length") == 1


def test_chosen_token_links_the_keys_that_it_reads(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    tokens(panel).nth(15).click()
    expect(panel.locator(".chosen")).to_contain_text("Token 15:")
    expect(panel.locator(".keys li")).to_have_count(12)
    linked = panel.locator(".links path").count()
    assert 11 <= linked <= 12  # all but itself
    assert panel.locator(".tokens .inside").count() == 5


def test_chosen_token_of_a_long_text_is_scrolled_into_view(browser: Browser, gated: Server) -> None:
    context = browser.new_context(viewport={"width": 400, "height": 300})
    page = context.new_page()
    panel = open_page(page, gated, f"{TEXT} " * 6)
    sheet, last = panel.locator(".sheet").bounding_box(), tokens(panel).last.bounding_box()
    assert sheet is not None
    assert last is not None
    assert sheet["y"] <= last["y"] <= sheet["y"] + sheet["height"]
    assert page.evaluate("window.scrollY") == 0
    context.close()


def test_key_in_the_list_leads_to_its_token(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    key = panel.locator(".keys li", has_not_text="itself").first.get_by_role("button")
    word = key.inner_text()
    key.click()
    expect(panel.locator(".chosen")).to_have_text(re.compile(rf"Token \d+: {re.escape(word)}$"))


def test_switching_the_head_shows_other_gates(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    before = tokens(panel).nth(12).get_attribute("aria-label")
    panel.get_by_label("Head", exact=True).select_option("2")
    panel.get_by_label("Layer", exact=True).select_option("1")
    expect(tokens(panel).nth(12)).not_to_have_attribute("aria-label", before or "")
    expect(panel.locator(".gates-map [aria-current]")).to_have_attribute("aria-label", re.compile("layer 1, head 2"))


def test_map_of_heads_leads_to_a_head(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    panel.locator(".gates-map").get_by_role("button", name="layer 1, head 3").click()
    expect(panel.get_by_label("Head", exact=True)).to_have_value("3")
    expect(panel.get_by_label("Layer", exact=True)).to_have_value("1")


def test_gates_held_at_local_leave_the_far_keys_unread(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    panel.get_by_label("Gates", exact=True).select_option("local")
    expect(panel.locator(".summary")).to_contain_text("100 % local")
    expect(panel.locator(".keys li")).to_have_count(5)


def test_next_tokens_stand_side_by_side(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    expect(panel.locator(".next h5")).to_have_text(["learned mix", "local only", "global only"])
    boxes = [one.bounding_box() for one in panel.locator(".next section").all()]
    assert len({box["y"] for box in boxes if box}) == 1
    expect(panel.locator(".next li")).to_have_count(30)


def test_answers_are_shown_as_they_come(visit: Visit, gated: Server) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        if '"local"' in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    visit.page.route("**/api/next", hold)
    visit.page.goto(f"{gated.address}#text={quote(TEXT)}")
    panel = visit.page.locator(".panel").first
    # The answer for local gates is on its way; what the token reads, the map and the learned mix are there.
    expect(panel.locator(".next .local")).to_contain_text("reading")
    expect(panel.locator(".keys li").first).to_be_visible()
    expect(panel.locator(".far-map")).to_be_visible()
    expect(panel.locator(".next .learned li")).to_have_count(10)
    held[0].continue_()
    settled(visit.page)
    expect(panel.locator(".next li")).to_have_count(30)


def test_two_models_stand_side_by_side_and_follow_each_other(visit: Visit, two: Server) -> None:
    first = open_page(visit.page, two)
    second = settled(visit.page, 1)
    tokens(first).nth(9).click()
    expect(second.locator(".chosen")).to_contain_text("Token 9:")
    boxes = [panel.bounding_box() for panel in (first, second)]
    assert len({box["y"] for box in boxes if box}) == 1
    assert visit.complaints == []


def test_dense_model_says_that_it_has_no_gate(visit: Visit, two: Server) -> None:
    open_page(visit.page, two)
    dense = settled(visit.page, 1)
    expect(dense.locator(".words")).to_have_text("dense: no gate: every key.")
    expect(dense.get_by_label("Gates", exact=True)).to_be_disabled()
    expect(dense.get_by_label("Colour", exact=True)).to_have_value("read")
    expect(dense.locator(".summary")).to_contain_text("no gate")
    expect(dense.locator(".next section")).to_have_count(1)


def test_learned_widths_are_drawn(visit: Visit, two: Server) -> None:
    panel = open_page(visit.page, two)
    shares = tokens(panel).evaluate_all("spans => spans.map(span => Number(span.style.getPropertyValue('--share')))")
    assert max(shares) == 1
    assert len(set(shares)) > 3
    panel.get_by_label("Colour", exact=True).select_option("width")
    expect(panel.locator(".legend")).to_contain_text("keys")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_as_text(visit: Visit, gated: Server, text: str) -> None:
    panel = open_page(visit.page, gated, text)
    shown = "".join(tokens(panel).all_text_contents())
    # Control characters get a sign, and the second token of one character another.
    assert shown.replace("␀", "\0").replace("␇", "\a").replace("◌", "") == text
    assert panel.locator(".tokens :is(script, img, svg, b)").count() == 0
    assert visit.complaints == []


def test_over_long_text_is_refused_with_its_count_and_a_shorter_one_is_read(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    field = visit.page.get_by_label("Text", exact=True)
    field.fill("0" * 300)
    expect(panel.get_by_role("alert")).to_have_text(
        "the text has 300 tokens, but head_gated reads at most 256; shorten it by 44"
    )
    field.fill("The town")
    expect(panel.get_by_role("alert")).to_be_hidden()
    expect(panel.locator(".chosen")).to_contain_text("town")


def test_view_can_be_shared_by_its_address(visit: Visit, browser: Browser, gated: Server) -> None:
    panel = open_page(visit.page, gated)
    panel.get_by_label("Head", exact=True).select_option("3")
    settled(visit.page)
    tokens(panel).nth(11).click()
    expect(panel.locator(".chosen")).to_contain_text("Token 11:")
    context = browser.new_context()
    other = context.new_page()
    other.goto(visit.page.url)
    shared = settled(other)
    expect(shared.locator(".chosen")).to_have_text(panel.locator(".chosen").inner_text())
    expect(shared.get_by_label("Head", exact=True)).to_have_value("3")
    assert other.get_by_label("Text", exact=True).input_value() == TEXT
    context.close()


def test_address_with_nonsense_still_opens_the_page(visit: Visit, gated: Server) -> None:
    panel = open_page(visit.page, gated, settings="layer=99&head=x&gates=open&character=-3&colour.7=red&__proto__=1")
    expect(panel.get_by_label("Layer", exact=True)).to_have_value("0")
    assert visit.complaints == []


def test_page_says_that_the_server_went_away_and_continues_when_it_is_back(visit: Visit) -> None:
    with Server(small_explorer("head_gated")) as server:
        panel = open_page(visit.page, server)
        server.stop()
        tokens(panel).nth(6).click()
        banner = visit.page.locator("#connection")
        expect(banner).to_contain_text("The server does not answer")
        server.start()
        expect(banner).to_be_hidden()
        expect(panel.locator(".chosen")).to_contain_text("Token 6:")
        expect(panel).to_have_attribute("aria-busy", "false")
        assert visit.complaints == []


def test_page_does_not_scroll_sideways_on_a_phone(browser: Browser, two: Server) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page = context.new_page()
    open_page(page, two)
    settled(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_on_every_shade(browser: Browser, gated: Server, scheme: str) -> None:
    context = browser.new_context(color_scheme="dark" if scheme == "dark" else "light")
    page = context.new_page()
    open_page(page, gated)
    names = [f"gate-{step}" for step in range(11)] + [f"amount-{step}" for step in range(7)] + ["silent"]
    least = page.evaluate(CONTRAST, names)
    assert least >= 4.5, "WCAG 2.2 AA asks for a contrast of 4.5"
    context.close()


CONTRAST = """names => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const paper = getComputedStyle(document.querySelector(".panel")).backgroundColor;
  const light = colour => {
    canvas.fillStyle = paper;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
    const linear = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const token = document.querySelector(".tokens span");
  const quiet = light(getComputedStyle(document.querySelector(".notice")).color);
  const inks = [light(getComputedStyle(document.body).color)];
  return Math.min(...names.flatMap(name => {
    token.className = `shade-${name}`;
    const ground = light(getComputedStyle(token).backgroundColor);
    return inks.map(ink => (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05));
  }));
}"""
