"""The prompts: how many, how they are split, and that Python's version does not matter."""

import hashlib

from dflashctl.demo.prompts import FAMILIES, all_prompts, split


def test_every_prompt_and_every_id_occurs_once():
    prompts = all_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)


def test_a_prompt_id_names_its_template_and_topic():
    by_id = {prompt.prompt_id: prompt for prompt in all_prompts()}
    prompt = by_id["subject-01-16"]
    assert prompt.text == "Explain the ocean in simple words."
    assert (prompt.template_key, prompt.topic_key) == ("subject-01", "subject/16")


def test_the_families_hold_2374_combinations():
    # 20 x 50 + 14 x 30 + 12 x 24 + 7 x 30 + 8 x 30 + 6 x 36
    sizes = [len(family.templates) * len(family.topics) for family in FAMILIES]
    assert sizes == [1000, 420, 288, 210, 240, 216]
    assert len(all_prompts()) == 2374


def test_the_split_gives_2220_and_80_prompts_that_never_meet():
    train, heldout = split()
    assert (len(train), len(heldout)) == (2220, 80)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in heldout}


def test_a_held_out_prompt_combines_a_known_template_with_a_known_topic():
    train, heldout = split()
    templates = {prompt.template_key for prompt in train}
    topics = {prompt.topic_key for prompt in train}
    strangers = [p for p in heldout if p.template_key not in templates or p.topic_key not in topics]
    assert strangers == []


def test_the_split_is_the_one_the_data_set_was_made_from():
    train, heldout = split()
    ids = "\n".join(prompt.prompt_id for prompt in heldout + train)
    assert hashlib.sha256(ids.encode()).hexdigest() == (
        "983cb225ef46062fa7be3e8e86dd022df3bde769db71a309d314426ee2994f52"
    )


def test_no_template_leaves_a_brace_and_no_prompt_a_double_space():
    assert [p for p in all_prompts() if "{" in p.text or "  " in p.text] == []
