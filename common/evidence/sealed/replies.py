"""Replies of RFC 3161 time-stamp authorities: read, and their signatures verified.

`rfc3161-client` reads a reply, and verifies it where the root of the authority is at hand. Without a root it
cannot; the signature is then verified with the certificate that the reply carries. That shows that nobody has
changed the reply, not who made it. The library is the extra `anchor`, and is loaded when a reply is read.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.evidence.records import printable, read_bytes
from common.repository import install_hint

MAX_REPLY_BYTES = 2**16  # with all certificates of a chain some have 7 KB
MAX_ROOTS_BYTES = 2**20
OBJECT, OCTETS, SET, PART_0 = 0x06, 0x04, 0x31, 0xA0  # tags of DER
CONTENT_TYPE = bytes.fromhex("2a864886f70d010903")
MESSAGE_DIGEST = bytes.fromhex("2a864886f70d010904")
TIME_STAMP = bytes.fromhex("2a864886f70d0109100104")
PSS = bytes.fromhex("2a864886f70d01010a")
DIGESTS = {  # the number of a digest -> its name
    bytes.fromhex("608648016503040201"): "sha256",
    bytes.fromhex("608648016503040202"): "sha384",
    bytes.fromhex("608648016503040203"): "sha512",
}
SHA256 = "2.16.840.1.101.3.4.2.1"


class Reply(NamedTuple):
    """A reply that could be read. `time_ms` since 1970 is whole seconds, cut off; `fault`: why it is wrong.

    `signer` is the subject of the certificate, `is_identified` true where it leads to a root that was given.
    """

    imprint: bytes
    time_ms: int
    accuracy_ms: float
    nonce: int | None
    signer: str
    is_identified: bool
    fault: str


class Element(NamedTuple):
    """A value in DER: its tag, its content, and all of its bytes."""

    tag: int
    content: bytes
    whole: bytes


def load_roots(path: Path) -> tuple[Any, ...]:
    """Load the certificates of a PEM file. Raises UserError, also where the library is not installed."""
    try:
        from cryptography.x509 import load_pem_x509_certificates

        return tuple(load_pem_x509_certificates(read_bytes(path, MAX_ROOTS_BYTES)))
    except ImportError as error:
        raise UserError("time-stamps cannot be verified", hint=install_hint("anchor")) from error
    except ValueError as error:
        hint = "--anchor-root names a file of certificates (PEM), as an authority publishes it"
        raise UserError(printable(str(error), 100), where=printable(str(path)), hint=hint) from error


def read_reply(data: bytes, roots: Sequence[Any] = ()) -> Reply:
    """Read a reply and verify its signature, with a root if any are given.

    Raises ValueError for data that are no reply with a time-stamp, and ImportError without the library.
    """
    from cryptography import exceptions, x509
    from rfc3161_client import PKIStatus, decode_timestamp_response

    unreadable = (
        *(LookupError, TypeError, AttributeError, OverflowError, exceptions.UnsupportedAlgorithm),
        *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
    )
    if len(data) > MAX_REPLY_BYTES:
        raise ValueError(f"larger than {MAX_REPLY_BYTES // 2**10} KiB")
    try:
        response = decode_timestamp_response(data)
        if response.status != PKIStatus.GRANTED:
            reason = printable(" ".join(map(str, response.status_string)), 100)
            raise ValueError(f"the authority refused (status {response.status}) {reason}".rstrip())
        info = response.tst_info
        if info.message_imprint.hash_algorithm.dotted_string != SHA256:
            raise ValueError("its hash is no SHA-256")
        certificate = find_signer(response)
        fault = verify_chain(response, roots) if roots else verify_alone(response, certificate)
        return Reply(
            imprint=bytes(info.message_imprint.message),
            time_ms=int(info.gen_time.timestamp()) * 1000,
            accuracy_ms=total_ms(info.accuracy),
            nonce=info.nonce,
            signer=printable(certificate.subject.rfc4514_string(), 100),
            is_identified=bool(roots) and not fault,
            fault=fault,
        )
    except unreadable as error:
        raise ValueError(f"cannot be read ({type(error).__name__})") from error


def total_ms(accuracy: Any) -> float:
    """Add up the accuracy that an authority states, 0 for none, in ms."""
    if accuracy is None:
        return 0.0
    return (accuracy.seconds or 0) * 1000 + (accuracy.millis or 0) + (accuracy.micros or 0) / 1000


def find_signer(response: Any) -> Any:
    """Return the certificate in a reply that its signature names. Raises ValueError."""
    from cryptography.x509 import load_der_x509_certificate

    signers = list(response.signed_data.signer_infos)
    if len(signers) != 1:
        raise ValueError(f"{len(signers)} signatures, not one")
    for data in response.signed_data.certificates:
        certificate = load_der_x509_certificate(data)
        if certificate.serial_number == signers[0].serial_number and certificate.issuer == signers[0].issuer:
            return certificate
    raise ValueError("no certificate of its signer")


def verify_chain(response: Any, roots: Sequence[Any]) -> str:
    """Say why a reply is not signed by an authority below one of the roots; '' if it is."""
    from rfc3161_client import VerificationError, VerifierBuilder

    verifier = VerifierBuilder(roots=list(roots)).build()
    try:
        verifier.verify(response, bytes(response.tst_info.message_imprint.message))
    except VerificationError as error:
        return printable(str(error), 150)
    return ""


def verify_alone(response: Any, certificate: Any) -> str:
    """Say why the signature of a reply does not fit it or its certificate; '' if it does."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        verify_signed_data(response.time_stamp_token(), certificate.public_key())
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, IndexError) as error:
        return printable(f"the signature is wrong {error}".rstrip(), 150)
    return ""


def verify_signed_data(token: bytes, key: Any) -> None:
    """Verify the signature of a token, CMS SignedData (RFC 5652, section 5).

    Raises ValueError, IndexError or an error of `cryptography` for a wrong one.
    """
    signed = parse(parse(parse(parse(token)[0].content)[1].content)[0].content)
    (signer,) = parse(signed[-1].content)
    kind, wrapped = parse(signed[2].content)
    content = parse(wrapped.content)[0].content
    _, _, digest, signed_attributes, algorithm, signature = parse(signer.content)[:6]
    if signed_attributes.tag != PART_0 or signature.tag != OCTETS:
        raise ValueError("(no signed attributes)")
    name = DIGESTS.get(parse(digest.content)[0].content, "")
    if not name:
        raise ValueError("(its digest is none of SHA-2)")
    attributes: dict[bytes, bytes] = {}
    for attribute in parse(signed_attributes.content):
        identifier, values = parse(attribute.content)
        if identifier.content in attributes:
            raise ValueError("(an attribute stands twice)")
        attributes[identifier.content] = parse(values.content)[0].content
    if not kind.content == attributes.get(CONTENT_TYPE) == TIME_STAMP:
        raise ValueError("(it is over no time-stamp)")
    if attributes.get(MESSAGE_DIGEST) != hashlib.new(name, content).digest():
        raise ValueError("(it is over another time-stamp)")
    message = bytes([SET]) + signed_attributes.whole[1:]
    verify_bytes(key, signature.content, message, name, is_pss=parse(algorithm.content)[0].content == PSS)


def verify_bytes(key: Any, signature: bytes, message: bytes, digest: str, *, is_pss: bool) -> None:
    """Verify a signature by an elliptic curve or RSA; errors as in `verify_signed_data`."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

    algorithm = getattr(hashes, digest.upper())()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(algorithm))
    elif isinstance(key, rsa.RSAPublicKey):
        pss = padding.PSS(mgf=padding.MGF1(algorithm), salt_length=padding.PSS.AUTO)
        key.verify(signature, message, pss if is_pss else padding.PKCS1v15(), algorithm)
    else:
        raise ValueError("(neither RSA nor an elliptic curve)")


def parse(data: bytes) -> list[Element]:
    """Split DER into the values that stand in it one behind the other. Raises ValueError."""
    elements, at = [], 0
    while at < len(data):
        if at + 2 > len(data):
            raise ValueError("(it is cut off)")
        length, begin = data[at + 1], at + 2
        if length >= 0x80:
            size = length - 0x80
            length, begin = int.from_bytes(data[begin : begin + size], "big"), begin + size
        end = begin + length
        if end > len(data):
            raise ValueError("(it is cut off)")
        elements.append(Element(data[at], data[begin:end], data[at:end]))
        at = end
    return elements
