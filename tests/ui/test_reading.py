"""What a reader does with the page: keys, filters, the slider, links."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def address(page: Any) -> str:
    return str(page.evaluate("location.hash"))


def test_keys_open_views_the_search_and_the_list_of_keys(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/now")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.locator("main .chart canvas").first.wait_for()
    assert address(page).startswith(f"#/jobs/{job}/curves")
    page.keyboard.press("/")
    page.keyboard.type("entropy")
    page.wait_for_function("() => document.querySelectorAll('main .curve').length === 1")
    assert "q=entropy" in address(page)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")


def test_the_first_tab_skips_to_the_content(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/now")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    assert address(page) == f"#/jobs/{job}/now"


def test_the_theme_is_remembered(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/now")
    page.get_by_role("button", name="Switch to the dark theme").click()
    reader.open(f"jobs/{job}/account")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_bin_of_the_rewards_filters_and_the_link_says_so(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/samples")
    page.locator(".histogram .bin").last.click()
    page.wait_for_function("() => decodeURIComponent(location.hash).includes('reward=>=')")
    page.locator(".sample-list .line .reward").first.wait_for()
    rewards = page.locator(".sample-list .line .reward").all_inner_texts()
    assert rewards
    assert all(float(one.replace("−", "-")) >= 0.9 for one in rewards)


def test_arrows_choose_a_sample_and_enter_opens_its_tokens(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/samples")
    page.locator(".sample-list .line").first.wait_for()
    page.locator(".sample-list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.locator(".side-by-side li").first.wait_for()
    page.keyboard.press("Enter")
    page.locator(".token-text .t").first.wait_for()
    page.locator(".token-box").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.t.chosen')?.id === 't1'")
    assert "token=1" in address(page)


def test_the_timeline_zooms_and_pans_with_wheel_drag_and_keys(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/timeline")
    canvas = page.locator(".timeline-frame canvas")
    canvas.wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.wheel(0, -600)
    page.wait_for_function("() => location.hash.includes('since=')")

    def shown() -> tuple[float, float]:
        found = re.findall(r"(?:since|until)=([\d.]+)", address(page))
        return float(found[0]), float(found[1])

    since, until = shown()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 80, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    panned = shown()
    assert panned[0] < since
    assert panned[1] - panned[0] == pytest.approx(until - since, abs=0.01)
    page.locator(".timeline-frame").focus()
    page.keyboard.press("+")
    assert shown()[1] - shown()[0] == pytest.approx(0.6 * (until - since), rel=0.01)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowRight")
    assert page.locator(".timeline-readout").inner_text()


def test_the_slider_redraws_and_keys_go_from_decision_to_decision(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/replay?seq=30")
    page.locator("main .react-flow__node").first.wait_for()
    page.keyboard.press("n")
    page.wait_for_function("() => !location.hash.includes('seq=30') && location.hash.includes('seq=')")
    at = address(page)
    page.locator("section[aria-label='The event'] h2").wait_for()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("before => location.hash !== before", arg=at)
    page.keyboard.press("p")
    page.wait_for_function("before => location.hash === before", arg=at)


def test_an_address_of_nothing_says_so(reader: Any, job: str) -> None:
    reader.open(f"jobs/{job}/now")
    reader.page.goto(f"{reader.base_url}#/jobs/{job}/nonsense")
    reader.says("There is no view nonsense.")
    reader.page.goto(f"{reader.base_url}#/jobs/no-such-job/now")
    reader.page.get_by_role("alert").wait_for()


def test_the_right_answer_is_beside_a_sample_in_list_group_and_tokens(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/samples?at=1")
    page.locator(".members .right-answer strong").wait_for()
    right = page.locator(".members .right-answer strong").inner_text()
    assert page.locator(".sample-list .line .right").nth(1).inner_text() == f"right answer: {right}"
    page.locator(".side-by-side li.chosen a").click()
    page.locator("main .token-text .t").first.wait_for()
    assert page.locator(".right-answer").inner_text() == f"Right answer: {right}"
    assert reader.errors == []


def test_two_versions_answer_the_same_held_out_prompts_and_what_changed_comes_first(
    reader: Any, job: str
) -> None:
    page = reader.open(f"jobs/{job}/samples")
    page.get_by_role("link", name="Held-out answers").click()
    page.locator(".held-out > li").first.wait_for()
    of_set, version, against = page.locator(".filters select").all()
    assert of_set.input_value() == "held_out"
    versions = version.locator("option").all_inner_texts()
    assert len(versions) > 2
    said = page.locator("main p[role=status]").inner_text()
    found = re.search(
        rf"Of (\d+) prompts (\d+) changed since version {versions[-2]}: (\d+) better, (\d+) worse", said
    )
    assert found, said
    total, changed, better, worse = map(int, found.groups())
    badges = [one.locator(".badge").count() for one in page.locator(".held-out > li").all()]
    assert badges == [1] * changed + [0] * (total - changed)
    assert better + worse == changed
    assert page.locator(".held-out > li").first.locator("h3").all_inner_texts() in (
        [f"Version {versions[-2]}: wrong", f"Version {versions[-1]}: right"],
        [f"Version {versions[-2]}: right", f"Version {versions[-1]}: wrong"],
    )
    against.select_option(versions[-1])
    page.wait_for_function("() => document.querySelectorAll('.held-out .badge').length === 0")
    assert f"against={versions[-1]}" in address(page)
    assert reader.errors == []


def test_what_the_reward_is_made_of_has_a_section_of_curves(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/curves")
    page.get_by_role("region", name="What the reward is made of").locator("canvas").first.wait_for()
    cards = page.get_by_role("region", name="What the reward is made of").locator("figcaption")
    assert [one.split("\n")[:2] for one in cards.all_inner_texts()] == [
        ["format", "mean, weight 0.2"],
        ["right", "mean, weight 1"],
    ]
    assert page.locator("section[aria-label='Other numbers'] .title", has_text="reward.").count() == 0


def test_what_the_policy_did_not_draw_is_told_apart_in_a_samples_tokens(reader: Any, job: str) -> None:
    page = reader.open(f"jobs/{job}/samples?at=1")
    page.locator(".side-by-side li.chosen a").click()
    page.locator("main .token-text .t").first.wait_for()
    total, masked = page.locator("main .t[data-at]").count(), page.locator("main .t.masked[data-at]").count()
    if not masked:  # a recorded job has answers of one turn
        assert "drawn by the policy" not in page.locator("main").inner_text()
        return
    assert f"{total - masked} of them drawn by the policy" in page.locator("main").inner_text().replace(
        ",", ""
    )
    assert page.get_by_text("not drawn by the policy in this row, and not in the loss").is_visible()
    page.locator("main .t.masked[data-at]").first.click()
    assert "no, masked" in page.locator(".token-facts").inner_text()
