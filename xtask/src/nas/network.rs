//! Network namespaces of a NAS, of what lies between, and of hosts, on one machine.
//!
//! ```text
//!   nas: server ─── 10.77.0.0/30 ─── wire: proxy that delays ─┬─ 1 Gbit/s ─ 10.78.1.0/24 ─── host 1
//!                                                             └─ 1 Gbit/s ─ 10.78.2.0/24 ─── host 2
//! ```
//!
//! A process that is started in a namespace ends with this one, and with the network.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// What a link carries of payload, each way: 1 Gbit/s less the headers of TCP, IP and Ethernet.
pub const WIRE_BYTES_PER_S: f64 = 125e6 * 1448.0 / 1514.0;
/// How names of namespaces begin; then comes the number of the process that made them.
const PREFIX: &str = "vmstrata-";
const NAMESPACES: &str = "/run/netns";
/// The server's address.
pub(super) const NAS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// Where an object store listens, at the same address.
pub(super) const S3_PORT: u16 = 9000;

/// See the module documentation. Dropping it ends what runs in it.
#[derive(Debug)]
pub struct Network {
    id: String,
    names: Vec<String>,
}

impl Network {
    /// A NAS and so many hosts. Needs the superuser.
    ///
    /// # Errors
    /// When `ip` or `tc` fail.
    pub fn new(hosts: u8) -> Result<Self> {
        remove_left_over()?;
        // Tests make several in one process.
        let id = format!("{PREFIX}{}-{:x}", std::process::id(), vmstrata_repo::draw_id() as u16);
        let mut network = Self { id, names: Vec::new() };
        let (nas, wire) = (network.add("nas")?, network.add("wire")?);
        network.join(&wire, ("nas0", "10.77.0.1/30"), &nas, (&format!("{NAS}/30"), false))?;
        for number in 1..=hosts {
            let host = network.add(&host_name(number))?;
            let (inner, outer) =
                (format!("{}/24", network.server_of(number)), format!("10.78.{number}.2/24"));
            network.join(&wire, (&format!("host{number}"), &inner), &host, (&outer, true))?;
        }
        Ok(network)
    }

    fn add(&mut self, name: &str) -> Result<String> {
        let full = self.name(name);
        ip(&["netns", "add", &full])?;
        self.names.push(full.clone());
        ip(&["-n", &full, "link", "set", "lo", "up"])?;
        Ok(full)
    }

    /// Joins two namespaces; the link is `eth0` in the second.
    fn join(
        &self,
        one: &str,
        (link, inner): (&str, &str),
        other: &str,
        (outer, is_slow): (&str, bool),
    ) -> Result<()> {
        ip(&["-n", one, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", other])?;
        for (namespace, link, address) in [(one, link, inner), (other, "eth0", outer)] {
            ip(&["-n", namespace, "addr", "add", address, "dev", link])?;
            ip(&["-n", namespace, "link", "set", link, "up"])?;
            if is_slow {
                let qdisc = ["qdisc", "add", "dev", link, "root", "handle", "1:", "htb", "default", "1"];
                tool("tc", &[&["-n", namespace], &qdisc[..]].concat())?;
                let class =
                    ["class", "add", "dev", link, "parent", "1:", "classid", "1:1", "htb", "rate", "1gbit"];
                tool("tc", &[&["-n", namespace], &class[..]].concat())?;
            }
        }
        Ok(())
    }

    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    /// The address by which a host reaches the NAS.
    pub fn server_of(&self, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 78, host, 1)
    }

    /// A command of a host.
    pub fn on_host(&self, host: u8, program: &Path) -> Command {
        self.command(&host_name(host), program)
    }

    /// A command in a namespace, which ends when the thread that starts it does.
    pub(super) fn command(&self, name: &str, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(name), "setpriv", "--pdeathsig", "KILL"]).arg(program);
        command
    }

    /// Moves this thread, and those that it starts from now on, into a namespace.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn enter(&self, name: &str) -> Result<()> {
        let namespace = File::open(Path::new(NAMESPACES).join(self.name(name)))?;
        Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Moves this thread, and those that it starts from now on, to a host.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn enter_host(&self, host: u8) -> Result<()> {
        self.enter(&host_name(host))
    }

    /// Bytes that a host has sent, with all headers.
    ///
    /// # Errors
    /// When its link cannot be read.
    pub fn sent_bytes(&self, host: u8) -> Result<u64> {
        self.link_bytes(host, "rx")
    }

    /// Bytes that were sent to a host, with all headers.
    ///
    /// # Errors
    /// As [`Network::sent_bytes`].
    pub fn received_bytes(&self, host: u8) -> Result<u64> {
        self.link_bytes(host, "tx")
    }

    fn link_bytes(&self, host: u8, direction: &str) -> Result<u64> {
        let link = ["-j", "-s", "-n", &self.name("wire"), "link", "show", "dev", &format!("host{host}")];
        let output = Command::new("ip").args(link).output().context("ip does not run")?;
        let links: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        links[0]["stats64"][direction]["bytes"].as_u64().context("bytes of a link")
    }

    /// Kills what runs in a namespace, and waits until it is gone.
    pub(super) fn clear(&self, name: &str) -> Result<()> {
        end_all(&self.name(name))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let removed = end_all(name).and_then(|()| ip(&["netns", "del", name]));
            if let Err(error) = removed {
                eprintln!("{name}: {error:#}");
            }
        }
    }
}

fn host_name(host: u8) -> String {
    format!("host{host}")
}

/// Ends the processes of a namespace, which are all its maker's.
fn end_all(namespace: &str) -> Result<()> {
    loop {
        let lists = Command::new("ip").args(["netns", "pids", namespace]).stdout(Stdio::piped()).spawn()?;
        // Of a thread that has entered the namespace, the command is there as well.
        let own = [lists.id(), std::process::id()].map(u32::cast_signed);
        let text = String::from_utf8(lists.wait_with_output()?.stdout)?;
        let pids: Vec<i32> =
            text.lines().filter_map(|line| line.parse().ok()).filter(|pid| !own.contains(pid)).collect();
        if pids.is_empty() {
            return Ok(());
        }
        for pid in pids.into_iter().filter_map(Pid::from_raw) {
            // It may have ended by now.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::yield_now();
    }
}

/// Removes namespaces of killed processes.
fn remove_left_over() -> Result<()> {
    for name in left_over(Path::new(NAMESPACES), PREFIX)? {
        end_all(&name)?;
        ip(&["netns", "del", &name])?;
    }
    Ok(())
}

/// Names in a directory that begin with `prefix` and the number of a process that is gone.
pub(super) fn left_over(dir: &Path, prefix: &str) -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let maker = name.strip_prefix(prefix).and_then(|rest| rest.split('-').next());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            names.push(name);
        }
    }
    Ok(names)
}

fn ip(arguments: &[&str]) -> Result<()> {
    tool("ip", arguments)
}

fn tool(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().with_context(|| format!("no {program}"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), told.trim());
    Ok(())
}
