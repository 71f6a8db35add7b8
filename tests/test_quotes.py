"""Which text of a prompt is to be written: 60 prompts in the marks of 20 scripts, and marks that open nothing."""

from __future__ import annotations

import time

import pytest

from retouch.rewards.quotes import quoted_texts, read_quotes

WRITTEN: list[tuple[str, list[str]]] = [
    # Latin
    ('A sign that says "OPEN"', ["OPEN"]),
    ("A sign that says 'OPEN'", ["OPEN"]),
    ("A sign that says “OPEN”", ["OPEN"]),
    ("A sign that says ‘OPEN’", ["OPEN"]),
    ('A 6\'2" man holds a sign that says "STOP"', ["STOP"]),
    ("A 24” monitor and a 10” tablet beside a sign, “ON SALE”", ["ON SALE"]),
    ('A 24" sign that says "Room 101"', ["Room 101"]),
    ("A rock 'n' roll bar with the sign 'OPEN'", ["OPEN"]),
    ("A '90s diner whose sign says 'EAT'", ["EAT"]),
    ("A poster: 'Rock 'n' Roll'", ["Rock 'n' Roll"]),
    ("The dogs' bowl says ‘Rex’s’", ["Rex’s"]),
    ("‘He said “Go” twice’ on a wall", ["He said “Go” twice"]),
    ('The wall reads "She said "no" again" in red', ['She said "no" again']),
    ("A shelf with “SALT” and ‘PEPPER’", ["SALT"]),
    ("Two doors, “IN” and “OUT”", ["IN", "OUT"]),
    ("Une enseigne « Boulangerie » à Lyon", ["Boulangerie"]),
    ("Un panneau\u202f: «\u00a0Ouvert\u00a0»", ["Ouvert"]),
    ("Une affiche « Il a dit « oui » hier »", ["Il a dit « oui » hier"]),
    ("Ein Schild mit „Geöffnet“", ["Geöffnet"]),
    ("Ein 24“ Monitor neben dem Schild „Tür zu‚ bitte‘“", ["Tür zu‚ bitte‘"]),
    ("Ein Schild mit »Ruhe« über der Tür", ["Ruhe"]),
    ("Ein Schild mit ‚Halt‘", ["Halt"]),
    ("Ein Schild mit ›Halt‹", ["Halt"]),
    ("En skylt med ”Öppet”", ["Öppet"]),
    ("En skylt med »Öppet»", ["Öppet"]),
    ("En skylt med ’Öppet’", ["Öppet"]),
    ("Tabliczka „Nie wchodzić”", ["Nie wchodzić"]),
    ("Una insegna con ‹Aperto›", ["Aperto"]),
    ("Biển hiệu ghi “Phở bò”", ["Phở bò"]),
    ("Jose\u0301's sign, 'Abierto'", ["Abierto"]),  # the accent is a character of its own
    # Greek, Cyrillic, Armenian, Georgian
    ("Πινακίδα «Ανοιχτό»", ["Ανοιχτό"]),
    ("Вывеска «Кафе „Ромашка“»", ["Кафе „Ромашка“"]),
    ("Табличка з п'ятьма літерами “М'ята”", ["М'ята"]),
    ("Ցուցանակ «Բաց է»", ["Բաց է"]),
    ("აბრა „ღიაა“", ["ღიაა"]),
    # Hebrew, Arabic, Persian
    ('שלט של צה"ל עם הכיתוב "פתוח"', ["פתוח"]),
    ("שלט עם ״שלום״", ["שלום"]),
    ('כתבה ב"הארץ"', ["הארץ"]),
    ("لافتة مكتوب عليها «مفتوح»", ["مفتوح"]),
    ("لافتة مكتوب عليها ”مفتوح“", ["مفتوح"]),
    ("تابلویی با «خوش آمدید»", ["خوش آمدید"]),
    # of India
    ("एक बोर्ड पर “खुला है” लिखा है", ["खुला है"]),
    ("একটি সাইনবোর্ডে ‘খোলা’ লেখা", ["খোলা"]),
    ('"திறந்திருக்கும்" என்ற பலகை', ["திறந்திருக்கும்"]),
    ("బోర్డు మీద “తెరిచి ఉంది”", ["తెరిచి ఉంది"]),
    # of Southeast Asia, Tibetan, Ethiopic
    ("ป้ายเขียนว่า “เปิด”", ["เปิด"]),
    ('ป้าย"เปิด"หน้าร้าน', ["เปิด"]),
    ("ປ້າຍ “ເປີດ”", ["ເປີດ"]),
    ("ស្លាក «បើក»", ["បើក"]),
    ("ဆိုင်းဘုတ် “ဖွင့်သည်”", ["ဖွင့်သည်"]),
    ("《བོད》", ["བོད"]),
    ("ምልክት «ክፍት»", ["ክፍት"]),
    # Korean, Japanese, Chinese
    ("간판에 '영업중'이라고 쓰여 있다", ["영업중"]),
    ("간판에 “24시간 영업”이라고", ["24시간 영업"]),
    ("看板に「営業中」と書いてある", ["営業中"]),
    ("看板に『本日休業』", ["本日休業"]),
    ("貼り紙「店主『また明日』より」", ["店主『また明日』より"]),
    ("横書きの｢ｶﾌｪ｣と〝珈琲〟", ["ｶﾌｪ", "珈琲"]),
    ("招牌上写着“2024年”，旁边是《红楼梦》", ["2024年"]),
    ("海报《红楼梦》", ["红楼梦"]),
    ("1米宽的横幅写着2024“新年快乐”", ["新年快乐"]),
    ('写着"你好"和＂再见＂的牌子', ["你好", "再见"]),
    ("﹁直書﹂的招牌", ["直書"]),
]

UNWRITTEN = [
    'A 24" monitor and a 10" tablet', 'A 6\'2" man and a 5\'4" woman', "A 24 \" screen, a 10 \" tablet",
    "rock 'n' roll and drum ‘n’ bass", "the dogs’ bowl and the cats’ one", "It’s five o’clock",
    "a sign that says “OPEN", "says OPEN”", 'a sign that says “OPEN"', "a '90s dog", "Home » Shop » Cart",
    "ein 24“ Monitor und ein 10“ Tablet", "“ ” and «\u00a0»", 'דו"ח של צה"ל', "'Tis the season", "a 24” x 10” frame",
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "texts"), WRITTEN)
def test_the_texts_of_a_prompt(prompt: str, texts: list[str]) -> None:
    assert quoted_texts(prompt) == texts


def test_the_table_is_large_enough() -> None:
    assert len(WRITTEN) >= 60


@pytest.mark.parametrize("prompt", UNWRITTEN)
def test_marks_that_open_nothing(prompt: str) -> None:
    assert quoted_texts(prompt) == []


@pytest.mark.parametrize(
    ("prompt", "others"),
    [
        ("a sign that says “OPEN", ["“OPEN"]),
        (
            'a sign that says “OPEN" on a wall beside the door',
            ['“OPEN" on a wall beside …'],
        ),
        ("'Tea' then \"Coffee\"", ["'Tea'"]),
        ("“一梦”，《红楼梦》", ["《红楼梦》"]),
        ("says OPEN”", ["”"]),
        ("a sign: 'OPEN", ["'OPEN"]),
        ("a 6'2\" man, a 24\" sign, the dogs' bowl, '90s rock 'n' roll", []),
        ("“He said ‘hi’ to 'em”", []),
    ],
)
def test_what_looks_like_a_text(prompt: str, others: list[str]) -> None:
    assert list(read_quotes(prompt).others) == others


@pytest.mark.parametrize(
    "prompt", ["“" * 15_000, "«”" * 15_000, " '90s" * 15_000 + "'", "„" * 15_000 + "“" * 15_000, " ’a ‘b" * 10_000]
)
def test_the_time_grows_with_the_length_alone(prompt: str) -> None:
    start = time.process_time()
    read_quotes(prompt)
    assert time.process_time() - start < 2.0  # quadratic: minutes
