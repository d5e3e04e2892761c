"""The effect of curation on each language."""

from __future__ import annotations

import random

import pytest

from tests.benchmarks.fairness import Labelled, fairness, gini, menu, misread, repeats, salad, twins

# Sentences for this test; a document has each of them once, in its own order, three per line.
SENTENCES = {
    "en": [
        "The council will decide next week whether the old bridge across the river is to be repaired.",
        "Many people who live in the villages nearby use it every day to get to work or to school.",
        "An engineer said that the stones of the arch were laid more than two hundred years ago.",
        "If the work begins in spring, the road could be open again before the first snow falls.",
        "Until then buses take the long way around the lake, and nobody is happy with that.",
        "The mayor hopes that the state will pay for at least a third of the costs.",
    ],
    "de": [
        "Der Gemeinderat entscheidet in der nächsten Woche, ob die alte Brücke über den Fluss saniert wird.",
        "Viele Menschen aus den Dörfern in der Nähe nutzen sie jeden Tag für den Weg zur Arbeit oder in die Schule.",
        "Eine Ingenieurin sagte, dass die Steine des Bogens vor mehr als zweihundert Jahren gesetzt wurden.",
        "Wenn die Arbeiten im Frühling beginnen, könnte die Straße vor dem ersten Schnee wieder offen sein.",
        "Bis dahin fahren die Busse den langen Weg um den See, und niemand ist damit zufrieden.",
        "Die Bürgermeisterin hofft, dass das Land mindestens ein Drittel der Kosten übernimmt.",
    ],
    "sw": [
        "Baraza la mji litaamua wiki ijayo iwapo daraja la zamani lililopo mtoni litakarabatiwa.",
        "Watu wengi wanaoishi katika vijiji vya karibu hulitumia kila siku kwenda kazini au shuleni.",
        "Mhandisi mmoja alisema kwamba mawe ya daraja hilo yaliwekwa zaidi ya miaka mia mbili iliyopita.",
        "Ikiwa kazi itaanza katika majira ya kuchipua, barabara inaweza kufunguliwa tena kabla ya mvua kubwa.",
        "Hadi wakati huo mabasi yanapita njia ndefu kuzunguka ziwa, na hakuna mtu anayefurahia jambo hilo.",
        "Meya anatumaini kwamba serikali italipa angalau theluthi moja ya gharama zote za kazi hiyo.",
    ],
    "th": [
        "สภาเมืองจะตัดสินใจในสัปดาห์หน้าว่าจะซ่อมสะพานเก่าข้ามแม่น้ำหรือไม่",
        "คนจำนวนมากที่อาศัยอยู่ในหมู่บ้านใกล้เคียงใช้สะพานนี้ทุกวันเพื่อไปทำงานหรือไปโรงเรียน",
        "วิศวกรคนหนึ่งกล่าวว่าหินของสะพานถูกวางไว้เมื่อกว่าสองร้อยปีก่อน",
        "ถ้างานเริ่มในฤดูใบไม้ผลิ ถนนอาจเปิดได้อีกครั้งก่อนที่ฝนแรกจะตก",
        "จนกว่าจะถึงเวลานั้นรถโดยสารต้องวิ่งอ้อมทะเลสาบเป็นระยะทางไกล และไม่มีใครพอใจกับเรื่องนี้",
        "นายกเทศมนตรีหวังว่ารัฐจะจ่ายค่าใช้จ่ายอย่างน้อยหนึ่งในสาม",
    ],
    "hy": [
        "Քաղաքային խորհուրդը հաջորդ շաբաթ կորոշի, թե արդյոք գետի վրայի հին կամուրջը պետք է վերանորոգվի:",
        "Մոտակա գյուղերում ապրող շատ մարդիկ ամեն օր օգտագործում են այն՝ աշխատանքի կամ դպրոց գնալու համար:",
        "Ինժեներներից մեկն ասաց, որ կամարի քարերը դրվել են ավելի քան երկու հարյուր տարի առաջ:",
        "Եթե աշխատանքները սկսվեն գարնանը, ճանապարհը կարող է կրկին բացվել մինչև առաջին ձյունը:",
        "Մինչ այդ ավտոբուսները երկար ճանապարհով շրջանցում են լիճը, և ոչ ոք դրանից գոհ չէ:",
        "Քաղաքապետը հույս ունի, որ պետությունը կվճարի ծախսերի առնվազն մեկ երրորդը:",
    ],
}


def documents():
    out = []
    for name, sentences in SENTENCES.items():
        order = random.Random(1).sample(sentences, len(sentences))
        blank = "" if name == "th" else " "
        out.append(Labelled(name, "\n".join(blank.join(order[at : at + 3]) for at in (0, 3))))
    return out


@pytest.fixture(scope="module")
def told():
    good = documents()
    return fairness([*good, *(twin for twin in twins(good) if twin.kind in ("menu", "misread", "repeats"))], changes=["select.language={}"])


def test_good_documents_of_every_language_stay(told):
    assert {row["language"]: (row["kept"], row["found"], row["rules"]) for row in told.rows} == {name: (1, name, "") for name in SENTENCES}
    assert told.figures["languages"] == told.figures["languages_near_reference"] == 5
    assert told.figures["languages_at_zero"] == told.figures["gini"] == 0


def test_spoilt_ones_go(told):
    # Thai has no sentence-final mark, by which menu lines of other languages are recognized.
    assert {row["language"] for row in told.rows if row["menu"]} <= {"th"}
    assert told.figures["spoilt_kept_repeats"] == 0
    # The English text here has no letter that changes when read as cp1252.
    assert told.figures["spoilt_kept_misread"] == 0
    assert [row["misread"] for row in told.rows if "misread" in row] == [0, 0, 0]


def test_ways_to_spoil_a_text():
    assert repeats("a\nb\nc\nd") == "a\na\na\na\nb\nc\nd\nd\nd\nd"
    assert misread("né “x”") == "nÃ© â€œxâ€"
    assert menu("One two three. Four five six seven!") == "One\ntwo\nFour\nfive"
    assert sorted(salad("a b a c d e f g").split()) == ["b", "c", "d", "e", "f", "g"]


def test_gini_of_shares():
    assert gini([1, 1, 1]) == 0 == gini([0, 0])
    # For n shares that are all zero except one: (n - 1) / n.
    assert gini([0, 0, 0, 1]) == pytest.approx(0.75)
