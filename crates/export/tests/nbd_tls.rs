//! TLS with stock clients, and what is refused without it.

use std::io::Write;
use std::path::Path;

use crate::nbd_common::client::{ACK, info_query};
use crate::nbd_common::{Client, Fixture, Setup, chain_content, make_chain, run, text, try_run};
use vmstrata_export::nbd::{Address, ClientRight, Error, Export, Listener, TlsConfig, TlsMode};

const ERR_INVALID: u32 = 0x8000_0003;
const ERR_TLS_REQD: u32 = 0x8000_0005;

/// An authority, a server certificate for localhost and a client certificate, named as GnuTLS wants them.
fn make_certificates(directory: &Path) {
    let file = |name: &str| text(&directory.join(name)).to_owned();
    for name in ["ca", "server", "client", "other-ca"] {
        // By openssl: certtool pads half of its EC keys in a way that ring refuses.
        let curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
        run("openssl", &[&["genpkey"][..], &curve, &["-out", &file(&format!("{name}-key.pem"))]].concat());
    }
    let template = |name: &str, lines: &str| {
        std::fs::write(
            directory.join(format!("{name}.info")),
            format!("cn = {name}\nexpiration_days = 2\n{lines}"),
        )
        .unwrap();
    };
    template("ca", "ca\ncert_signing_key\n");
    template("other-ca", "ca\ncert_signing_key\n");
    template("server", "dns_name = localhost\nip_address = 127.0.0.1\ntls_www_server\nsigning_key\n");
    template("client", "dns_name = client\ntls_www_client\nsigning_key\n");
    for ca in ["ca", "other-ca"] {
        let key = file(&format!("{ca}-key.pem"));
        let (info, cert) = (file(&format!("{ca}.info")), file(&format!("{ca}-cert.pem")));
        run(
            "certtool",
            &["--generate-self-signed", "--load-privkey", &key, "--template", &info, "--outfile", &cert],
        );
    }
    for name in ["server", "client"] {
        let (key, info, cert) = (
            file(&format!("{name}-key.pem")),
            file(&format!("{name}.info")),
            file(&format!("{name}-cert.pem")),
        );
        let (ca, ca_key) = (file("ca-cert.pem"), file("ca-key.pem"));
        let authority = ["--load-ca-certificate", &ca, "--load-ca-privkey", &ca_key];
        let own = ["--generate-certificate", "--load-privkey", &key, "--template", &info, "--outfile", &cert];
        run("certtool", &[&own[..], &authority].concat());
    }
}

struct Tls {
    fixture: Fixture,
    port: u16,
}

impl Tls {
    fn new(mode: fn(TlsConfig) -> TlsMode, client_ca: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        make_certificates(directory.path());
        let file = |name: &str| directory.path().join(name);
        let client_ca = client_ca.map(file);
        let config = TlsConfig::load(&file("server-cert.pem"), &file("server-key.pem"), client_ca.as_deref());
        let path = make_chain(directory.path());
        let setup = Setup { tls: mode(config.unwrap()), ..Setup::default() };
        let mut fixture = Fixture::serve(directory, &path, setup);
        let listener = Listener::bind(&"tcp:localhost:0".parse().unwrap()).unwrap();
        let Address::Tcp { port, .. } = *listener.address() else { panic!("a TCP address") };
        fixture.server.as_mut().unwrap().listen(listener).unwrap();
        Self { fixture, port }
    }

    fn uri(&self, scheme: &str) -> String {
        let certificates = text(self.fixture.directory.path());
        format!("{scheme}://localhost:{}/disk?tls-certificates={certificates}", self.port)
    }
}

#[test]
fn stock_clients_read_and_write_over_tls() {
    let tls = Tls::new(TlsMode::Require, None);
    let info = run("nbdinfo", &[&tls.uri("nbds")]);
    assert!(String::from_utf8_lossy(&info.stdout).contains("with TLS"));
    let copy = tls.fixture.path("copy");
    run("nbdcopy", &[&tls.uri("nbds"), text(&copy)]);
    assert!(std::fs::read(&copy).unwrap() == chain_content());
    run("nbdcopy", &["--request-size=2097152", text(&copy), &tls.uri("nbds")]);
    let credentials =
        format!("tls-creds-x509,id=t,endpoint=client,dir={}", text(tls.fixture.directory.path()));
    let image = format!("driver=nbd,host=localhost,port={},export=disk,tls-creds=t", tls.port);
    run(
        "qemu-img",
        &[
            "compare",
            "-q",
            "--object",
            &credentials,
            "--image-opts",
            &image,
            &format!("driver=raw,file.driver=file,file.filename={}", text(&copy)),
        ],
    );
}

#[test]
fn without_tls_nothing_is_told_where_it_is_required() {
    let tls = Tls::new(TlsMode::Require, None);
    let mut client = Client::connect(&tls.fixture.socket());
    for (option, data) in [(3, vec![]), (7, info_query("disk", &[])), (8, vec![]), (77, vec![])] {
        let replies = client.option(option, &data);
        assert_eq!(replies.len(), 1);
        assert_eq!(replies[0].0, ERR_TLS_REQD, "option {option}");
    }
    assert_eq!(client.option(5, b"x")[0].0, ERR_INVALID, "STARTTLS takes no data");
    assert_eq!(client.option(2, &[])[0].0, ACK, "ABORT is always possible");
    let mut client = Client::connect(&tls.fixture.socket());
    client.send_option(1, b"disk");
    assert!(client.is_hung_up(), "EXPORT_NAME cannot be told");
    assert!(!try_run("nbdinfo", &[&tls.uri("nbd")]).status.success());
}

#[test]
fn clients_choose_where_tls_is_allowed() {
    let tls = Tls::new(TlsMode::Allow, None);
    run("nbdinfo", &[&tls.uri("nbd")]);
    run("nbdinfo", &[&tls.uri("nbds")]);
}

#[test]
fn client_certificates_are_checked_against_their_authority() {
    let tls = Tls::new(TlsMode::Require, Some("ca-cert.pem"));
    run("nbdinfo", &[&tls.uri("nbds")]);
    let strict = Tls::new(TlsMode::Require, Some("other-ca-cert.pem"));
    let refused = try_run("nbdinfo", &[&strict.uri("nbds")]);
    assert!(!refused.status.success(), "the client's certificate is of another authority");
}

#[test]
fn clients_find_the_exports_that_their_certificates_have_rights_to() {
    let tls = Tls::new(TlsMode::Require, Some("ca-cert.pem"));
    let right = |client: &str, writes| vec![ClientRight { client: client.to_owned(), writes }];
    for (name, clients) in [
        ("reads", right("CN=client", false)),
        ("writes", right("DNS=client", true)),
        ("no", right("CN=clien", true)),
    ] {
        let export = Export::new(name, tls.fixture.disk.clone()).with_clients(clients);
        tls.fixture.server().exports().add(export).unwrap();
    }
    let uri = |export: &str| tls.uri("nbds").replace("/disk?", &format!("/{export}?"));
    let listed = run("nbdinfo", &["--list", "--json", &tls.uri("nbds")]);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    for (name, is_listed) in [("reads", true), ("writes", true), ("no", false)] {
        assert_eq!(listed.contains(&format!("\"{name}\"")), is_listed, "{name}: {listed}");
    }
    assert!(try_run("nbdinfo", &["--is", "read-only", &uri("reads")]).status.success());
    assert!(!try_run("nbdinfo", &["--is", "read-only", &uri("writes")]).status.success());
    assert!(!try_run("nbdinfo", &[&uri("no")]).status.success());
}

#[test]
fn plain_text_behind_starttls_is_not_taken_for_tls() {
    let tls = Tls::new(TlsMode::Allow, None);
    let mut client = Client::connect(&tls.fixture.socket());
    let option = |kind: u32| [&b"IHAVEOPT"[..], &kind.to_be_bytes(), &0u32.to_be_bytes()].concat();
    // A man in the middle adds an option to the client's STARTTLS.
    client.socket.write_all(&[option(5), option(3)].concat()).unwrap();
    let acknowledged = client.take(20);
    assert_eq!(acknowledged[12..16], ACK.to_be_bytes());
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut client.socket, &mut rest);
    assert!(!rest.windows(4).any(|window| window == b"disk"), "the list of exports in answer to plain text");
}

#[test]
fn files_that_are_no_credentials_are_named() {
    let directory = tempfile::tempdir().unwrap();
    make_certificates(directory.path());
    let file = |name: &str| directory.path().join(name);
    std::fs::write(file("empty.pem"), "").unwrap();
    let (cert, key) = (file("server-cert.pem"), file("server-key.pem"));
    for (cert, key, ca, culprit) in [
        (&file("none.pem"), &key, None, "none.pem"),
        (&cert, &file("empty.pem"), None, "empty.pem"),
        (&file("empty.pem"), &key, None, "empty.pem"),
        (&cert, &file("client-key.pem"), None, "server-cert.pem"),
        (&cert, &key, Some(file("empty.pem")), "empty.pem"),
    ] {
        let error = TlsConfig::load(cert, key, ca.as_deref()).unwrap_err();
        assert!(matches!(&error, Error::Credential { path, .. } if path.ends_with(culprit)), "{error}");
    }
}
