//! How to plug a served disk into what the user runs: lines to copy, for QEMU, libvirt, cloud-hypervisor and NBD clients.
//!
//! Pure text: nothing here opens a socket. Every value that comes from the user passes the quoting of the
//! place it ends up in (shell, QEMU option, XML, URI), so that a copied line means what it says.

use std::path::Path;

use serde::Serialize;
use vmstrata_api::{NbdSpec, VhostUserSpec, encode_segment};
use vmstrata_export::nbd::Address;
use vmstrata_types::path_to_text;

use crate::key_values::escape;

/// How to attach one vhost-user socket.
#[derive(Debug, Serialize)]
pub struct VhostUserAttachment {
    /// The socket's absolute path.
    pub socket: String,
    /// Arguments for a QEMU command line, two by two.
    pub qemu: Vec<String>,
    /// Elements for a libvirt domain.
    pub libvirt: String,
    /// Arguments for cloud-hypervisor, two by two.
    pub cloud_hypervisor: Vec<String>,
}

/// How to attach one disk over one NBD address.
#[derive(Debug, Serialize)]
pub struct NbdAttachment {
    /// What nbdinfo, nbdcopy, qemu-img and others take.
    pub uri: String,
    /// Arguments for a QEMU command line, two by two.
    pub qemu: Vec<String>,
    /// An element for a libvirt domain.
    pub libvirt: String,
}

impl VhostUserAttachment {
    /// The lines for `spec`, as the guest's disk of this number, from 0.
    pub fn new(spec: &VhostUserSpec, number: usize) -> Self {
        let socket = absolute(Path::new(&spec.socket));
        Self {
            qemu: vhost_user_qemu(spec, &socket),
            libvirt: vhost_user_libvirt(spec, &socket, number),
            cloud_hypervisor: vhost_user_cloud_hypervisor(spec, &socket),
            socket,
        }
    }

    /// The lines as a person reads them, below the line that names the disk.
    pub fn to_text(&self) -> String {
        format!(
            "  vhost-user on {}\n    QEMU:\n{}\n    libvirt:\n{}\n    cloud-hypervisor:\n{}\n",
            self.socket,
            indent(&shell_lines(&self.qemu)),
            indent(&self.libvirt),
            indent(&shell_lines(&self.cloud_hypervisor)),
        )
    }
}

impl NbdAttachment {
    /// The lines for the disk `disk` through the export of `spec`, if that has an address, as the guest's disk of this number, from 0.
    pub fn new(disk: &str, spec: &NbdSpec, tls: bool, number: usize) -> Option<Self> {
        let address = &spec.address.parse().ok()?;
        let writes = spec.rw || spec.allow.iter().any(|right| right.rw);
        let scheme = if tls { "nbds" } else { "nbd" };
        let export = encode_segment(disk);
        let uri = match address {
            Address::Unix(path) => {
                format!("{scheme}+unix:///{export}?socket={}", percent_encode_path(&absolute(path)))
            }
            Address::Tcp { host, port } if host.contains(':') => {
                format!("{scheme}://[{host}]:{port}/{export}")
            }
            Address::Tcp { host, port } => format!("{scheme}://{host}:{port}/{export}"),
        };
        let libvirt = nbd_libvirt(disk, address, (tls, writes), number);
        Some(Self { qemu: nbd_qemu(disk, address, tls, writes), libvirt, uri })
    }

    /// The lines as a person reads them, below the line that names the disk.
    pub fn to_text(&self) -> String {
        let (qemu, libvirt) = (indent(&shell_lines(&self.qemu)), indent(&self.libvirt));
        format!("  NBD at {}\n    QEMU:\n{qemu}\n    libvirt:\n{libvirt}\n", shell_quote(&self.uri))
    }
}

/// vhost-user needs the guest's memory in a file both processes map, hence memfd and share=on.
fn vhost_user_qemu(spec: &VhostUserSpec, socket: &str) -> Vec<String> {
    let id = qemu_id(&spec.disk);
    let arguments = [
        "-object",
        "memory-backend-memfd,id=mem,size=2G,share=on",
        "-machine",
        "q35,memory-backend=mem",
        "-m",
        "2G",
        "-chardev",
        &format!("socket,id=vhost-{id},path={},reconnect=1", escape(socket)),
        "-device",
        &format!("vhost-user-blk-pci,id={id},chardev=vhost-{id}{}", queues_option(spec, ",num-queues=")),
    ];
    arguments.map(str::to_owned).to_vec()
}

/// Left out, each of them takes what suits the guest's processors, or one: the server offers enough.
fn queues_option(spec: &VhostUserSpec, prefix: &str) -> String {
    spec.queues.map_or_else(String::new, |queues| format!("{prefix}{queues}"))
}

fn vhost_user_libvirt(spec: &VhostUserSpec, socket: &str, number: usize) -> String {
    format!(
        "<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>
<!-- inside <devices>: -->
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw'{}/>
  <source type='unix' path='{}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='{}' bus='virtio'/>
</disk>",
        spec.queues.map_or_else(String::new, |queues| format!(" queues='{queues}'")),
        xml_escape(socket),
        libvirt_target(number)
    )
}

/// What libvirt calls a guest's virtio disk of this number: vda to vdz, then vdaa and so on.
fn libvirt_target(number: usize) -> String {
    let mut letters = Vec::new();
    let mut left = number + 1;
    while left > 0 {
        left -= 1;
        letters.push(char::from(b'a' + (left % 26) as u8));
        left /= 26;
    }
    format!("vd{}", letters.iter().rev().collect::<String>())
}

fn vhost_user_cloud_hypervisor(spec: &VhostUserSpec, socket: &str) -> Vec<String> {
    let queues = queues_option(spec, ",num_queues=");
    let disk = format!("vhost_user=true,socket={socket}{queues}");
    vec!["--memory".to_owned(), "size=2G,shared=on".to_owned(), "--disk".to_owned(), disk]
}

fn nbd_qemu(disk: &str, address: &Address, tls: bool, writes: bool) -> Vec<String> {
    let id = qemu_id(disk);
    let server = match address {
        Address::Unix(path) => format!("server.type=unix,server.path={}", escape(&absolute(path))),
        Address::Tcp { host, port } => {
            format!("server.type=inet,server.host={},server.port={port}", escape(host))
        }
    };
    let mut arguments = Vec::new();
    let mut credentials = "";
    if tls {
        arguments.push("-object".to_owned());
        arguments.push("tls-creds-x509,id=tls,endpoint=client,dir=/path/to/pki".to_owned());
        credentials = ",tls-creds=tls";
    }
    arguments.push("-blockdev".to_owned());
    let read_only = if writes { "" } else { ",read-only=on" };
    let node = format!(
        "driver=nbd,node-name={id},{server},export={},reconnect-delay=60{read_only}{credentials}",
        escape(disk)
    );
    arguments.push(node);
    arguments.push("-device".to_owned());
    arguments.push(format!("virtio-blk-pci,drive={id}"));
    arguments
}

/// A guest whose server is restarted must wait. libvirt has no setting for that on which its versions agree, so the guest stops,
/// and goes on with `virsh resume`, which QEMU 7.2 needs twice; without this the guest gets an error, and ext4 aborts its journal.
fn nbd_libvirt(disk: &str, address: &Address, (tls, writes): (bool, bool), number: usize) -> String {
    let host = match address {
        Address::Unix(path) => format!("transport='unix' socket='{}'", xml_escape(&absolute(path))),
        Address::Tcp { host, port } => format!("name='{}' port='{port}'", xml_escape(host)),
    };
    format!(
        "<disk type='network' device='disk'>
  <driver name='qemu' type='raw' error_policy='stop' rerror_policy='stop'/>
  <source protocol='nbd' name='{}'{}>
    <host {host}/>
  </source>
  <target dev='{}' bus='virtio'/>{}
</disk>",
        xml_escape(disk),
        if tls { " tls='yes'" } else { "" },
        libvirt_target(number),
        if writes { "" } else { "\n  <readonly/>" }
    )
}

/// A path that means the same from every directory, without asking the file system: sockets do not exist yet.
pub fn absolute(path: &Path) -> String {
    path_to_text(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
}

/// `name` as QEMU allows it for ids and node names: a letter, then letters, digits, `-`, `.` and `_`, 31 at most.
fn qemu_id(name: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let mut id: String = name.chars().map(|c| if fits(c) { c } else { '_' }).collect();
    if !id.starts_with(|c: char| c.is_ascii_alphabetic()) {
        id.insert_str(0, "disk-");
    }
    id.truncate(31);
    id
}

/// Each option with its value on a line of its own, continued the way a shell reads it.
pub fn shell_lines(arguments: &[String]) -> String {
    let lines: Vec<String> = arguments
        .chunks(2)
        .map(|pair| pair.iter().map(|word| shell_quote(word)).collect::<Vec<_>>().join(" "))
        .collect();
    lines.join(" \\\n")
}

/// `word` as a shell reads it.
pub fn shell_quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// `text` inside an element or a quoted attribute.
pub fn xml_escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&apos;")
        .replace('"', "&quot;")
}

/// A path inside a URI, with its slashes, as every NBD tool writes socket paths.
fn percent_encode_path(text: &str) -> String {
    text.split('/').map(encode_segment).collect::<Vec<_>>().join("/")
}

/// Each line, further to the right.
pub fn indent(text: &str) -> String {
    text.lines().map(|line| format!("      {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VhostUserSpec {
        (&crate::disk_spec::parse_vhost_user(text).unwrap()).into()
    }

    fn nbd(disk: &str, export: &str, tls: bool) -> NbdAttachment {
        let spec = crate::disk_spec::parse_nbd(export).unwrap();
        NbdAttachment::new(disk, &(&spec).into(), tls, 0).unwrap()
    }

    #[test]
    fn qemu_gets_shared_memory_a_reconnecting_socket_and_the_queues() {
        let lines = VhostUserAttachment::new(&spec("web=/run/web.sock,queues=4"), 0);
        let joined = lines.qemu.join(" ");
        assert_eq!(
            joined,
            "-object memory-backend-memfd,id=mem,size=2G,share=on -machine q35,memory-backend=mem -m 2G \
             -chardev socket,id=vhost-web,path=/run/web.sock,reconnect=1 \
             -device vhost-user-blk-pci,id=web,chardev=vhost-web,num-queues=4"
        );
        assert_eq!(lines.cloud_hypervisor[3], "vhost_user=true,socket=/run/web.sock,num_queues=4");
    }

    #[test]
    fn without_a_number_the_queues_are_left_to_the_hypervisor() {
        let lines = VhostUserAttachment::new(&spec("web=/run/web.sock"), 0);
        assert_eq!(lines.qemu[9], "vhost-user-blk-pci,id=web,chardev=vhost-web");
        assert!(lines.libvirt.contains("<driver name='qemu' type='raw'/>"), "{}", lines.libvirt);
        assert_eq!(lines.cloud_hypervisor[3], "vhost_user=true,socket=/run/web.sock");
    }

    #[test]
    fn hostile_socket_names_are_quoted_for_where_they_go() {
        let lines = VhostUserAttachment::new(&spec("web=/run/a,,b'<&>.sock"), 0);
        assert!(lines.qemu[7].contains("path=/run/a,,b'<&>.sock,reconnect"), "{}", lines.qemu[7]);
        assert!(lines.libvirt.contains("path='/run/a,b&apos;&lt;&amp;&gt;.sock'"), "{}", lines.libvirt);
        assert!(lines.to_text().contains(r"path=/run/a,,b'\''<&>.sock"), "{}", lines.to_text());
    }

    #[test]
    fn each_disk_has_a_target_of_its_own() {
        let targets = [0, 1, 25, 26, 701, 702].map(libvirt_target);
        assert_eq!(targets, ["vda", "vdb", "vdz", "vdaa", "vdzz", "vdaaa"]);
        let lines = VhostUserAttachment::new(&spec("web=/run/web.sock"), 1);
        assert!(lines.libvirt.contains("<target dev='vdb' "), "{}", lines.libvirt);
    }

    #[test]
    fn sockets_are_shown_absolute() {
        let here = std::env::current_dir().unwrap();
        let lines = VhostUserAttachment::new(&spec("web=web.sock"), 0);
        assert_eq!(Path::new(&lines.socket), here.join("web.sock"));
    }

    #[test]
    fn ids_are_what_qemu_accepts() {
        assert_eq!(qemu_id("web"), "web");
        assert_eq!(qemu_id("0 web/ü"), "disk-0_web__");
        assert_eq!(qemu_id(&"w".repeat(40)).len(), 31);
    }

    #[test]
    fn nbd_uris_follow_the_uri_specification() {
        let uri = |disk: &str, address: &str, tls| nbd(disk, address, tls).uri;
        assert_eq!(uri("web", "unix:/run/n b.sock", false), "nbd+unix:///web?socket=/run/n%20b.sock");
        assert_eq!(uri("a b/c", "tcp:localhost", false), "nbd://localhost:10809/a%20b%2Fc");
        assert_eq!(uri("web", "tcp:[::1]:7", true), "nbds://[::1]:7/web");
        assert_eq!(uri("web", "unix:/s", true), "nbds+unix:///web?socket=/s");
    }

    #[test]
    fn qemu_gets_a_reconnecting_nbd_node() {
        let lines = nbd("a,b", "unix:/run/x,,y.sock,rw", true).qemu.join(" ");
        assert_eq!(
            lines,
            "-object tls-creds-x509,id=tls,endpoint=client,dir=/path/to/pki \
             -blockdev driver=nbd,node-name=a_b,server.type=unix,server.path=/run/x,,y.sock,export=a,,b,\
             reconnect-delay=60,tls-creds=tls -device virtio-blk-pci,drive=a_b"
        );
        let read = nbd("web", "unix:/s", false).qemu.join(" ");
        assert!(read.contains("reconnect-delay=60,read-only=on -device"), "{read}");
    }

    #[test]
    fn shell_lines_can_be_pasted() {
        let words: Vec<String> = ["-a", "b c", "-d", "it's"].map(str::to_owned).to_vec();
        assert_eq!(shell_lines(&words), "-a 'b c' \\\n-d 'it'\\''s'");
    }
}
