//! What every kind of repository must do.

use std::io::ErrorKind;
use std::sync::Barrier;

use vmstrata_repo::{Error, Hold, NewObject, ObjectName, ObjectReader, Repository};

/// The rule for the names of the repositories that are tested.
pub(crate) fn is_tested(name: &str) -> bool {
    name != "foreign"
}

/// Tests a repository that is empty.
pub(crate) fn test_kind(repository: &dyn Repository) {
    let _held = hold(repository);
    test_objects(repository);
}

/// The same of one that is held, or need not be.
pub(crate) fn test_objects(repository: &dyn Repository) {
    an_object_is_there_whole_or_not_at_all(repository);
    nothing_is_overwritten_unasked(repository);
    ranges_are_read_up_to_the_end(repository);
    names_are_listed_by_prefix(repository);
    names_have_limits(repository);
    what_is_not_there_is_not_found_and_can_be_deleted(repository);
    an_object_is_renamed_in_one_step(repository);
    copies_have_a_limit(repository);
}

/// Of several that create one object, at the same moment, one does.
pub(crate) fn test_race(repositories: &[&dyn Repository], rounds: usize) {
    let _held: Vec<_> = repositories.iter().map(|repository| hold(*repository)).collect();
    for round in 0..rounds {
        let name = name(&format!("head-{round}"));
        let barrier = Barrier::new(repositories.len());
        let race = |(racer, repository): (usize, &&dyn Repository)| {
            let mut object = repository.create_new(&name, 1).expect("begins");
            object.write(&[racer as u8; 1000]).expect("takes");
            object.sync().expect("flushes");
            barrier.wait();
            object.finish()
        };
        let ends: Vec<Result<(), Error>> = std::thread::scope(|scope| {
            let racers: Vec<_> =
                repositories.iter().enumerate().map(|racer| scope.spawn(move || race(racer))).collect();
            racers.into_iter().map(|racer| racer.join().expect("no panic")).collect()
        });
        let winners: Vec<usize> = (0..ends.len()).filter(|racer| ends[*racer].is_ok()).collect();
        assert!(matches!(winners[..], [_]), "{ends:?}");
        let losers = ends.iter().filter_map(|end| end.as_ref().err());
        assert!(losers.clone().all(|error| error.kind() == ErrorKind::AlreadyExists), "{ends:?}");
        assert_eq!(read(repositories[0], &name), [winners[0] as u8; 1000]);
    }
    assert_eq!(names(repositories[0], "").len(), rounds);
}

fn hold(repository: &dyn Repository) -> Option<vmstrata_repo::Held> {
    repository.capabilities().holds.then(|| repository.hold(Hold::Write).expect("holds").expect("waits"))
}

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

fn names(repository: &dyn Repository, prefix: &str) -> Vec<String> {
    let listed = repository.list(prefix).expect("lists");
    let mut names: Vec<String> = listed.iter().map(|object| object.name.to_string()).collect();
    let alone = repository.names(prefix).expect("lists");
    assert_eq!(alone.iter().map(ToString::to_string).collect::<Vec<_>>(), names);
    names.sort();
    names
}

fn put(mut object: Box<dyn NewObject>, bytes: &[u8]) -> Result<(), Error> {
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    object.write(first)?;
    object.write_out()?;
    object.write(rest)?;
    object.finish()
}

fn make(repository: &dyn Repository, name: &ObjectName, bytes: &[u8]) {
    put(repository.replace(name, 1).expect("begins"), bytes).expect("finishes");
}

fn read(repository: &dyn Repository, name: &ObjectName) -> Vec<u8> {
    whole(repository.open(name).expect("opens").as_ref())
}

fn whole(reader: &dyn ObjectReader) -> Vec<u8> {
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes).expect("reads");
    bytes
}

/// Bytes of which no two blocks are alike.
fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ at >> 9) as u8).collect()
}

/// Two blocks of HDFS. Asked for a third, a NameNode refuses it while it has not heard of the first, and the client does not ask
/// again.
const LARGE: usize = (3 << 19) + 123;

fn an_object_is_there_whole_or_not_at_all(repository: &dyn Repository) {
    let (name, bytes) = (name("whole"), content(LARGE));
    for begin in [Repository::create_new, Repository::replace] {
        let mut object = begin(repository, &name, 1).expect("begins");
        object.write(&bytes).expect("takes");
        object.sync().expect("flushes");
        assert_eq!(names(repository, ""), [""; 0]);
        assert_eq!(repository.open(&name).err().expect("has no name").kind(), ErrorKind::NotFound);
        if repository.capabilities().read_back {
            assert!(whole(object.read_back().expect("opens").as_ref()) == bytes);
        }
        drop(object);
        assert_eq!(names(repository, ""), [""; 0]);

        if repository.capabilities().early_read_back {
            // It ends with a hole, as far as it is written.
            let (zeros, mut early) = ([0; 8192], vec![1; 8192 + 700_001]);
            let mut object = begin(repository, &name, 1).expect("begins");
            object.write(&bytes[..700_001]).and_then(|()| object.write(&zeros)).expect("takes");
            object.write_out().expect("flushes");
            object.read_back().and_then(|early_bytes| early_bytes.read_at(0, &mut early)).expect("reads");
            assert!(early == [&bytes[..700_001], &zeros].concat());
        }
        let mut object = begin(repository, &name, 1).expect("begins");
        bytes.chunks(700_001).for_each(|part| object.write(part).expect("takes"));
        object.finish().expect("finishes");
        let listed = repository.list("").expect("lists");
        assert_eq!((listed.len(), &listed[0].name, listed[0].len), (1, &name, LARGE as u64));
        assert!(listed[0].allocated >= LARGE as u64 && listed[0].copies == 1, "{listed:?}");
        assert!(read(repository, &name) == bytes);
        repository.delete(&name).expect("deletes");
    }
}

fn nothing_is_overwritten_unasked(repository: &dyn Repository) {
    let name = name("one");
    let late = repository.create_new(&name, 1).expect("begins");
    put(repository.create_new(&name, 1).expect("begins"), b"first").expect("is new");
    assert_eq!(put(late, b"late").expect_err("is not new").kind(), ErrorKind::AlreadyExists);
    let refused = repository.create_new(&name, 1).and_then(|object| put(object, b"second"));
    let refused = refused.expect_err("is not new");
    assert_eq!((refused.kind(), refused.object.as_ref()), (ErrorKind::AlreadyExists, Some(&name)));
    assert_eq!(refused.repository, repository.describe());
    assert_eq!(read(repository, &name), b"first");

    make(repository, &name, b"other");
    assert_eq!((read(repository, &name), names(repository, "")), (b"other".to_vec(), vec!["one".to_owned()]));
    repository.delete(&name).expect("deletes");
    put(repository.create_new(&name, 1).expect("begins"), b"again").expect("is new");
    repository.delete(&name).expect("deletes");
}

fn ranges_are_read_up_to_the_end(repository: &dyn Repository) {
    let (large, empty, bytes) = (name("large"), name("empty"), content(LARGE));
    make(repository, &large, &bytes);
    let reader = repository.open(&large).expect("opens");
    for (at, len) in [(0, 1), (1 << 20, 1), ((1 << 20) - 3, 7), (5, LARGE - 5), (LARGE - 1, 1), (LARGE, 0)] {
        let mut range = vec![0; len];
        reader.read_at(at as u64, &mut range).expect("reads");
        assert!(range == bytes[at..at + len], "{len} from {at}");
    }
    for (at, len) in [(LARGE as u64 - 1, 2), (LARGE as u64, 1), (LARGE as u64 + 1, 0), (u64::MAX, 1)] {
        let past = reader.read_at(at, &mut vec![0; len]).expect_err("ends before");
        assert_eq!(
            (past.kind(), past.offset, past.object),
            (ErrorKind::UnexpectedEof, Some(at), Some(large.clone()))
        );
    }
    make(repository, &empty, b"");
    let reader = repository.open(&empty).expect("opens");
    assert!(reader.is_empty() && reader.read_at(0, &mut []).is_ok());
    assert_eq!(reader.read_at(0, &mut [0]).expect_err("is empty").kind(), ErrorKind::UnexpectedEof);
    [large, empty].iter().for_each(|name| repository.delete(name).expect("deletes"));
}

fn names_are_listed_by_prefix(repository: &dyn Repository) {
    let all = ["db.1", "web.1", "web.2", "web-1", "Web.1"].map(name);
    all.iter().for_each(|name| make(repository, name, name.as_str().as_bytes()));
    assert_eq!(names(repository, "web."), ["web.1", "web.2"]);
    assert_eq!(names(repository, "web.1"), ["web.1"]);
    assert_eq!(names(repository, "x"), [""; 0]);
    assert_eq!(names(repository, "").len(), 5);
    all.iter().for_each(|name| assert_eq!(read(repository, name), name.as_str().as_bytes()));
    all.iter().for_each(|name| repository.delete(name).expect("deletes"));
}

fn names_have_limits(repository: &dyn Repository) {
    let longest = name(&"n".repeat(ObjectName::MAX_LEN));
    make(repository, &longest, b"long");
    assert_eq!(names(repository, ""), [longest.as_str()]);
    assert_eq!(read(repository, &longest), b"long");
    repository.delete(&longest).expect("deletes");
    for hostile in
        ["", ".", "..", "/", "../x", "a/b", "a\0", ".x", "lock", &"n".repeat(ObjectName::MAX_LEN + 1)]
    {
        assert!(ObjectName::new(hostile).is_err(), "{hostile:?}");
    }
    let foreign = name("foreign");
    let refused = [
        repository.create_new(&foreign, 1).err(),
        repository.replace(&foreign, 1).err(),
        repository.delete(&foreign).err(),
    ];
    assert!(refused.iter().all(|error| error.as_ref().map(Error::kind) == Some(ErrorKind::InvalidInput)));
}

fn what_is_not_there_is_not_found_and_can_be_deleted(repository: &dyn Repository) {
    let nothing = name("nothing");
    let missing = repository.open(&nothing).err().expect("is not there");
    assert_eq!((missing.kind(), missing.object.as_ref()), (ErrorKind::NotFound, Some(&nothing)));
    repository.delete(&nothing).expect("is not there");
}

fn an_object_is_renamed_in_one_step(repository: &dyn Repository) {
    let (from, to) = (name("from"), name("to"));
    make(repository, &from, b"from");
    make(repository, &to, b"to");
    let renamed = repository.rename(&from, &to);
    if repository.capabilities().rename {
        renamed.expect("renames");
        assert_eq!((names(repository, ""), read(repository, &to)), (vec!["to".to_owned()], b"from".to_vec()));
        assert_eq!(repository.rename(&from, &to).expect_err("is gone").kind(), ErrorKind::NotFound);
    } else {
        let refused = renamed.expect_err("cannot rename");
        assert_eq!(refused.to_string(), format!("{}: renaming from", repository.describe()));
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert_eq!(names(repository, ""), ["from", "to"]);
    }
    [from, to].iter().for_each(|name| repository.delete(name).expect("deletes"));
}

fn copies_have_a_limit(repository: &dyn Repository) {
    let most = repository.capabilities().max_copies;
    for copies in [0, most + 1] {
        let refused = repository.replace(&name("copies"), copies).err().expect("too few or too many");
        assert!(refused.source.to_string().contains(&format!("not {copies}")), "{refused:?}");
    }
}
