"""Requests that proxies have logged, in the lines and the JSON of Cilium's monitor.

Source: Cilium 1.17, pkg/monitor/logrecord.go; pkg/proxy/accesslog for the JSON.
"""

from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from hive.dbg.go_text import numbered

_QUERY_TYPES: Final = numbered(
    "1 A 2 NS 3 MD 4 MF 5 CNAME 6 SOA 7 MB 8 MG 9 MR 10 NULL 12 PTR 13 HINFO 14 MINFO 15 MX 16 TXT "
    "17 RP 18 AFSDB 24 SIG 25 KEY 28 AAAA 29 LOC 33 SRV 35 NAPTR 36 KX 37 CERT 39 DNAME 41 OPT 43 DS "
    "44 SSHFP 46 RRSIG 47 NSEC 48 DNSKEY 50 NSEC3 51 NSEC3PARAM 52 TLSA 53 SMIMEA 64 SVCB 65 HTTPS "
    "99 SPF 249 TKEY 250 TSIG 251 IXFR 252 AXFR 255 ANY 256 URI 257 CAA"
)
"""Names of query types, as in miekg/dns; those without one have none."""


def _protocol_of(record: dict[str, Any]) -> str:
    for name in ("HTTP", "Kafka", "DNS"):
        if record.get(name) is not None:
            return name.lower()
    return str(record["L7"].get("Proto", "")) if record.get("L7") is not None else "unknown-l7"


def _labels_of(party: dict[str, Any]) -> str:
    texts = []
    for label in party.get("Labels", ()):
        value = label.get("Value", "")
        texts.append(f"{label.get('Source', '')}:{label.get('Key', '')}" + (f"={value}" if value else ""))
    return f"[{' '.join(texts)}]"


def request_line(record: dict[str, Any]) -> str:
    """A request or its answer in one line."""
    source, destination = record.get("SourceEndpoint", {}), record.get("DestinationEndpoint", {})
    direction = {"Ingress": "<-", "Egress": "->"}.get(record.get("ObservationPoint", ""), "??")
    kind = record.get("Type", "")
    from_, to = (f"{party.get('ID', 0)} ({_labels_of(party)})" for party in (source, destination))
    ends = {"Request": f"from {from_} to {to}", "Response": f"to {to} from {from_}"}.get(kind)
    line = ""
    if ends is not None:
        line = (
            f"{direction} {kind} {_protocol_of(record)} {ends}, identity {source.get('Identity', 0)}->"
            f"{destination.get('Identity', 0)}, verdict {record.get('Verdict', '')}"
        )
    if (http := record.get("HTTP")) is not None:
        line += f" {http.get('Method', '')} {http.get('URL', '')} => {http.get('Code', 0)}"
    if (kafka := record.get("Kafka")) is not None:
        topic = kafka.get("Topic", {}).get("Topic", "")
        line += f" {kafka.get('APIKey', '')} topic {topic} => {kafka.get('ErrorCode', 0)}"
    if (dns := record.get("DNS")) is not None:
        line += _dns_text(dns, kind)
    if (other := record.get("L7")) is not None:
        fields = dict(other.get("Fields", {}))
        status = fields.pop("status", "")
        line += "".join(f" {name}:{value}" for name, value in fields.items())
        line += f" => status:{status}" if status else ""
    return line


def _dns_text(dns: dict[str, Any], kind: str) -> str:
    types = ",".join(_QUERY_TYPES.get(one, "") for one in dns.get("QTypes", ()))
    text = f" DNS {dns.get('ObservationSource', '')}: {dns.get('Query', '')} {types}"
    if kind == "Request":
        return text
    if kind != "Response":
        return ""
    text += f" TTL: {dns.get('TTL', 0)} Answer: '{','.join(_addresses(dns))}'"
    return text + (f" CNAMEs: {','.join(dns['CNAMEs'])}" if dns.get("CNAMEs") else "")


def _addresses(dns: dict[str, Any]) -> list[str]:
    return [str(ip_address(one)) for one in dns.get("IPs", ())]


def request_record(record: dict[str, Any]) -> dict[str, Any]:
    """A request or its answer for JSON."""
    found: dict[str, Any] = {
        "type": "logRecord",
        "observationPoint": record.get("ObservationPoint", ""),
        "flowType": record.get("Type", ""),
        "l7Proto": _protocol_of(record),
    }
    for name, party in (("src", "SourceEndpoint"), ("dst", "DestinationEndpoint")):
        end = record.get(party, {})
        found[f"{name}EpID"] = end.get("ID", 0)
        found[f"{name}EpLabels"] = [_label(one) for one in end.get("Labels", ())] or None
        found[f"{name}Identity"] = end.get("Identity", 0)
    found["verdict"] = record.get("Verdict", "")
    if (http := record.get("HTTP")) is not None:
        found["http"] = {
            "Code": http.get("Code", 0),
            "Method": http.get("Method", ""),
            "URL": _url(http.get("URL", "")),
            "Protocol": http.get("Protocol", ""),
            "Headers": http.get("Headers"),
            "MissingHeaders": http.get("MissingHeaders"),
            "RejectedHeaders": http.get("RejectedHeaders"),
        }
    if (kafka := record.get("Kafka")) is not None:
        found["kafka"] = kafka
    if (dns := record.get("DNS")) is not None:
        order = ("Query", "IPs", "TTL", "CNAMEs", "ObservationSource", "RCode", "QTypes", "AnswerTypes")
        shown = dns | {"IPs": _addresses(dns)}
        found["dns"] = {name: shown[name] for name in order if shown.get(name)}
    if (other := record.get("L7")) is not None:
        found["l7"] = other
    return found


def _label(label: dict[str, Any]) -> dict[str, str]:
    value = {"value": label["Value"]} if label.get("Value") else {}
    return {"key": label.get("Key", ""), **value, "source": label.get("Source", "")}


def _url(text: str) -> dict[str, Any] | None:
    """A URL by its parts, as Go's encoding/json writes net/url's type."""
    if not text:
        return None
    parts = urlsplit(text)
    return {
        "Scheme": parts.scheme,
        "Opaque": "",
        "User": None,
        "Host": parts.netloc,
        "Path": parts.path,
        "RawPath": "",
        "OmitHost": False,
        "ForceQuery": False,
        "RawQuery": parts.query,
        "Fragment": parts.fragment,
        "RawFragment": "",
    }
