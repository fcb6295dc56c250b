"""What an agent's words ask the owner of a telephone to do: by the benchmark's names of tools, or as people say it."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


_WORDS = {
    "check_status_bar": r"status bar",
    "check_network_status": r"network status",
    "check_network_mode_preference": r"(check|what|which|see|look)\b.*network mode",
    "run_speed_test": r"speed test",
    "toggle_airplane_mode": r"(turn|toggle|switch|disable|enable)\b.*air ?plane mode",
    "check_sim_status": r"(check|what|status)\b.*sim\b",
    "reseat_sim_card": r"(reseat|reinsert|re-insert|remove|take out)\b.*sim\b",
    "toggle_data_saver_mode": r"(turn|toggle|switch|disable|enable)\b.*data saver",
    "toggle_data": r"(turn|toggle|switch|disable|enable)\b.*mobile data",
    "toggle_roaming": r"(turn|toggle|switch|disable|enable)\b.*roaming",
    "check_data_restriction_status": r"(check|is|whether)\b.*data saver",
    "reset_apn_settings": r"reset\b.*apn",
    "check_apn_settings": r"(check|what|see|look)\b.*apn",
    "check_wifi_calling_status": r"(check|is|whether)\b.*wi-?fi calling",
    "toggle_wifi_calling": r"(turn|toggle|switch|disable|enable)\b.*wi-?fi calling",
    "check_wifi_status": r"(check|is|whether)\b.*wi-?fi\b(?! calling)",
    "toggle_wifi": r"(turn|toggle|switch|disable|enable)\b.*wi-?fi\b(?! calling)",
    "disconnect_vpn": r"(disconnect|turn off|disable|switch off)\b.*vpn",
    "connect_vpn": r"\b(connect|turn on|enable|switch on)\b.*vpn",
    "check_vpn_status": r"(check|is|are|whether)\b.*vpn",
    "check_installed_apps": r"installed apps|which apps",
    "can_send_mms": r"(try|can|able|test)\b.*\bmms\b",
    "reboot_device": r"reboot|restart",
    "check_payment_request": r"(check|see|got|received)\b.*payment request",
    "make_payment": r"(make|complete|confirm)\b.*payment|pay\b.*bill",
}
"""How people ask for what a tool does; for all, the tool's own name does it too."""
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_MODE = re.compile(r"4g_5g_preferred|4g_only|3g_only|2g_only")
_PERMISSION = re.compile(r"grant\b.*?\b(sms|storage|camera|location|network|phone)\b", re.IGNORECASE)
_APP = re.compile(r"check\b.*\bpermissions?\b", re.IGNORECASE)


def asked(message: str, tools: Container[str]) -> list[Call]:
    """What the message asks for, in its order: at most one thing for each of its sentences."""
    found = (_asked(sentence) for sentence in _SENTENCE.split(message))
    return [call for call in found if call is not None and call.name in tools]


def _asked(sentence: str) -> Call | None:
    app = "browser" if "browser" in sentence.lower() else "messaging"
    if mode := _MODE.search(sentence):
        return Call("set_network_mode_preference", {"mode": mode[0]})
    if permission := _PERMISSION.search(sentence):
        return Call("grant_app_permission", {"app_name": app, "permission": permission[1].lower()})
    if _APP.search(sentence):
        return Call("check_app_permissions", {"app_name": app})
    for name, words in _WORDS.items():
        if re.search(rf"\b{name}\b|{words}", sentence, re.IGNORECASE):
            return Call(name, {})
    return None
