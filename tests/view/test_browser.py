"""The views in a real browser: what lights up, stepping by mouse and keyboard, no requests, no errors, no overflow."""

import shutil

import pytest
from view_rounds import make_rounds, page, words

from glance import view
from glance.view import story

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser, google-chrome or chrome on PATH"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver on PATH"),
]
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,900"
)
LIT = """return [...document.querySelectorAll('.tree g.r, .tree g.n, .tree g.b')].filter(g => {
  const s = getComputedStyle(g.querySelector(':scope>rect'));
  return s.stroke === s.color && s.strokeOpacity === '1' && s.strokeWidth === '2.5px';
}).map(g => g.classList.contains('n') ? g.classList[1] : g.classList[0]).sort()"""
ROUNDS = make_rounds()
LONG = max(ROUNDS, key=lambda r: r.accepted)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser, tmp_path):
    def load(*views, width=1400, dark=False):
        (tmp_path / "page.html").write_text(page(*views, dark=dark), encoding="utf-8")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 0, "y": 0})
        browser.get((tmp_path / "page.html").as_uri())
        return browser

    return load


def hover(browser, selector):
    box = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", box)
    ActionChains(browser, duration=0).move_to_element(box).perform()


def ancestors(tree, node):
    return sorted(["r", *(f"k{i}" for i in tree.path(node))])


def shown(browser):
    panels = browser.find_elements(By.CSS_SELECTOR, ".d>.p")
    return [i for i, panel in enumerate(panels) if panel.is_displayed()]


def now(browser):
    """Tell which chunks of the stream are outlined, and how many are dimmed."""
    chunks = browser.execute_script(
        "return [...document.querySelectorAll('.c')].map(c => getComputedStyle(c)).map(s => [s.outlineStyle, s.opacity])"
    )
    return [i for i, (line, _) in enumerate(chunks) if line == "solid"], sum(alpha != "1" for _, alpha in chunks)


@pytest.mark.parametrize("dark", [False, True])
def test_hover_lights_exactly_the_ancestors(show, dark):
    browser = show(view.tree(LONG, words), view.tree(ROUNDS[0].tree, words), dark=dark)
    assert browser.execute_script(LIT) == []
    for node in [*LONG.path, *range(0, 63, 7)]:
        hover(browser, f".k{node}>rect")
        assert browser.execute_script(LIT) == ancestors(LONG.tree, node), node
    faded = (
        "return [...document.querySelectorAll('.r *')].filter(e => getComputedStyle(e).opacity < 1).map(e => e.tagName)"
    )
    tags = browser.execute_script(faded)
    unlit = 63 + 1 - len(LONG.tree.path(node))  # with the bonus
    assert tags.count("rect") == unlit and "g" not in tags  # faded once, not once per ancestor
    hover(browser, ".r>rect")
    assert browser.execute_script(LIT) == ["r"]
    hover(browser, ".b>rect")
    assert browser.execute_script(LIT) == sorted(["b", *ancestors(LONG.tree, LONG.path[-1])])


def test_focus_lights_the_ancestors_and_a_click_leaves_nothing_lit(show):
    browser = show(view.tree(LONG, words))
    seen = set()
    for _ in range(12):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        active = browser.execute_script("return document.activeElement.classList[1] || 'r'")
        node = -1 if active == "r" else int(active[1:])
        assert browser.execute_script(LIT) == ancestors(LONG.tree, node)
        seen.add(node)
    assert len(seen) == 12
    browser = show(view.tree(LONG, words))
    ActionChains(browser, duration=0).click(browser.find_element(By.CSS_SELECTOR, ".k3>rect")).perform()
    hover(browser, ".k40>rect")
    assert browser.execute_script(LIT) == ancestors(LONG.tree, 40)


def test_a_node_lights_its_row_of_the_mask_and_a_row_its_path(show):
    browser = show(view.round(LONG, ROUNDS, words))
    rows = "return [...document.querySelectorAll('.m')].filter(m => getComputedStyle(m.firstElementChild.nextElementSibling)"
    rows += ".fillOpacity > 0).map(m => m.classList[m.classList.length - 1])"
    for node in (0, LONG.path[-1], 62):
        hover(browser, f".k{node}>rect")
        assert browser.execute_script(rows) == [f"m{node}"]
        hover(browser, f".m{node}>rect")
        assert set(browser.execute_script(LIT)) | {"r"} == set(ancestors(LONG.tree, node))


def test_stepping_by_mouse(show):
    browser = show(view.decode(ROUNDS, words, prompt="What is owed?"))
    assert (shown(browser), now(browser)) == ([0], ([1], len(ROUNDS) - 1))
    browser.find_elements(By.CSS_SELECTOR, ".d>input:checked+.p label")[-1].click()  # next
    assert (shown(browser), now(browser)) == ([1], ([2], len(ROUNDS) - 2))
    browser.find_elements(By.CSS_SELECTOR, ".d>input:checked+.p label")[0].click()  # back
    assert shown(browser) == [0]
    browser.find_elements(By.CSS_SELECTOR, ".d>input")[3].click()
    assert shown(browser) == [3]
    browser.find_elements(By.CSS_SELECTOR, ".c")[5].click()
    assert shown(browser) == [4]
    hover(browser, ".note")
    assert now(browser)[0] == [5]


def test_stepping_by_keyboard(show):
    browser = show(view.decode(ROUNDS, words))
    ActionChains(browser).send_keys(Keys.TAB).perform()
    for step in range(1, len(ROUNDS)):
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
        assert shown(browser) == [step]
    ActionChains(browser).send_keys(Keys.ARROW_LEFT).perform()
    assert shown(browser) == [len(ROUNDS) - 2]


def test_a_tree_grows_node_by_node(show):
    browser = show(story.growth(LONG, words, first=5))
    there = """return [...document.querySelectorAll('.tree .n')].filter(g => getComputedStyle(g).opacity === '1')
      .map(g => +g.classList[1].slice(1)).sort((a, b) => a - b)"""
    assert browser.execute_script(there) == list(range(5)) and shown(browser) == [4]
    browser.find_elements(By.CSS_SELECTOR, ".d>input")[9].click()
    assert browser.execute_script(there) == list(range(10)) and shown(browser) == [9]
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert browser.execute_script(there) == list(range(11))
    hover(browser, ".r>rect")
    assert browser.execute_script(there) == list(range(11)), "pointing at a node brings none that is not there yet"


def test_stream_says_its_round(show):
    browser = show(view.stream(ROUNDS, words))
    hover(browser, ".c:nth-child(3)")
    said = browser.execute_script("return getComputedStyle(document.querySelectorAll('.c')[2], '::after').content")
    fact = f"round 2: accepted {ROUNDS[1].accepted} of 63 nodes, entropy {ROUNDS[1].entropy:.2f} nats"
    assert said in (f'"{fact}"', "attr(data-t)")
    assert browser.find_elements(By.CSS_SELECTOR, ".c")[2].get_attribute("data-t") == fact


@pytest.mark.parametrize("width", [320, 768, 1920])
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_fits_the_page_and_is_quiet(show, width, dark):
    browser = show()
    for log in ("performance", "browser"):
        browser.get_log(log)
    views = {
        "tree": view.tree(LONG, words),
        "mask": view.mask(LONG, words),
        "marginals": view.marginals(LONG, words),
        "stream": view.stream(ROUNDS, words),
        "round": view.round(LONG, ROUNDS, words),
        "decode": view.decode(ROUNDS, words, prompt="W" * 300),
        "growth": story.growth(LONG, words),
        "walk": story.walk(LONG, words),
        "rhythm": story.rhythm({"one": ROUNDS, "two": ROUNDS[:3]}),
        "beside": story.beside(view.stream(ROUNDS, words), "W" * 300, titles=["a", "b"]),
    }
    for name, one in views.items():
        show(one, width=width, dark=dark)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, name
    events = "".join(entry["message"] for entry in browser.get_log("performance"))
    asked = [part.split('"')[0] for part in events.split('"documentURL":"')[1:]]
    assert asked and all(url.startswith("file:") for url in asked)
    assert events.count('"Network.requestWillBeSent"') == len(views)  # the pages themselves
    assert browser.get_log("browser") == []
