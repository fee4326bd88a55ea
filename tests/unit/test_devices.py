"""Reading /sys: trees of machines that are not here."""

from pathlib import Path

import pytest

from tensorwire.memory.devices import has_ucx, interface, interfaces, rdma_ports


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def nic(root: Path, name: str, **files: str) -> Path:
    """An interface; `device` makes it hardware."""
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    if files.pop("device", None):
        (folder / "device").mkdir()
    write(folder, {key: f"{value}\n" for key, value in files.items()})
    return folder


def port(root: Path, device: str = "mlx5_0", number: int = 1, **changes: str) -> Path:
    folder = root / "sys/class/infiniband" / device / "ports" / str(number)
    files = {
        "state": "4: ACTIVE",
        "rate": "100 Gb/sec (4X EDR)",
        "link_layer": "Ethernet",
        "gids/0": "fe80:0000:0000:0000:0e42:a1ff:fe00:0001",
        "gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        "gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
        "gid_attrs/ndevs/0": "eth2",
        "gid_attrs/ndevs/1": "eth2",
    }
    write(folder, {key: f"{value}\n" for key, value in (files | changes).items()})
    return folder


def test_an_interface_of_hardware_promises_its_speed(tmp_path: Path) -> None:
    nic(tmp_path, "eth0", device="yes", speed="100000", mtu="9000", carrier="1", operstate="up",
        duplex="full")  # fmt: skip
    found = interface("eth0", tmp_path)
    assert found is not None
    assert (found.megabits_per_s, found.mtu, found.duplex) == (100000, 9000, "full")
    assert found.carrier is True
    assert found.promised_gb_per_s == 12.5


@pytest.mark.parametrize(
    ("files", "promised"),
    [
        ({"speed": "10000"}, None),  # veth: the kernel makes it up
        ({"speed": "-1", "device": "yes"}, None),
        ({"device": "yes"}, None),  # a virtual machine's NIC that does not say
        ({"speed": "Invalid argument", "device": "yes"}, None),
        ({"speed": "25000", "uevent": "DEVTYPE=vlan\nINTERFACE=eth0.5"}, 3.125),
        ({"speed": "50000", "bonding/mode": "802.3ad 4"}, 6.25),
    ],
)
def test_what_can_be_believed(
    tmp_path: Path, files: dict[str, str], promised: float | None
) -> None:
    nic(tmp_path, "x", **files)
    found = interface("x", tmp_path)
    assert found is not None
    assert found.promised_gb_per_s == promised
    assert found.carrier is None
    assert found.state == "unknown"


def test_all_interfaces_but_loopback(tmp_path: Path) -> None:
    for name in ("lo", "eth1", "eth0"):
        nic(tmp_path, name)
    (tmp_path / "sys/class/net/bonding_masters").write_text("bond0\n")  # a file among folders
    assert [each.name for each in interfaces(tmp_path)] == ["eth0", "eth1"]
    assert interface("nothing", tmp_path) is None
    assert interfaces(tmp_path / "elsewhere") == []


def test_a_roce_port(tmp_path: Path) -> None:
    port(tmp_path)
    (found,) = rdma_ports(tmp_path)
    assert (found.device, found.port, found.state, found.link_layer) == (
        "mlx5_0", 1, "ACTIVE", "Ethernet",
    )  # fmt: skip
    assert found.active
    assert len(found.gids) == 2  # the unset one is none
    assert found.netdev == "eth2"
    assert found.promised_gb_per_s == 12.5


def test_ports_of_several_devices(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_1", 2, state="1: DOWN", rate="", link_layer="InfiniBand")
    port(tmp_path, "mlx5_0")
    folder = port(tmp_path, "rxe0", **{"gid_attrs/ndevs/0": "", "gid_attrs/ndevs/1": ""})
    write(folder.parents[1], {"parent": "eth0\n"})
    found = {each.device: each for each in rdma_ports(tmp_path)}
    assert list(found) == ["mlx5_0", "mlx5_1", "rxe0"]
    assert not found["mlx5_1"].active
    assert found["mlx5_1"].promised_gb_per_s is None
    assert found["rxe0"].netdev == "eth0"
    assert found["rxe0"].promised_gb_per_s is None  # software promises nothing


def test_a_port_without_any_file(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/odd0/ports/1").mkdir(parents=True)
    (found,) = rdma_ports(tmp_path)
    assert (found.state, found.gids, found.netdev) == ("unknown", (), "")


def test_ucx_is_found_without_loading_it(tmp_path: Path) -> None:
    assert not has_ucx(tmp_path)
    write(tmp_path, {"etc/ld.so.cache": "\0libucp.so.0.1\0"})
    assert not has_ucx(tmp_path)
    write(tmp_path, {"etc/ld.so.cache": "\0libucp.so.0\0/usr/lib/libucp.so.0\0"})
    assert has_ucx(tmp_path)


def test_ucx_without_a_cache(tmp_path: Path) -> None:
    write(tmp_path, {"usr/local/lib/libucp.so.0": ""})
    assert has_ucx(tmp_path)
