BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0008');
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	folder TEXT NOT NULL, 
	ranks INTEGER NOT NULL, 
	first_step INTEGER NOT NULL, 
	last_step INTEGER NOT NULL, 
	gained BOOLEAN, 
	outcome VARCHAR(32), 
	cause TEXT NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	CONSTRAINT pk_attempts PRIMARY KEY (id), 
	CONSTRAINT fk_attempts_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE, 
	CONSTRAINT uq_attempts_session_id UNIQUE (session_id, number)
);
INSERT INTO "attempts" VALUES(1,1,1,'train','runs/test/1/attempts/1.1',1,0,22,1,'lost','no rank left a word (the shim was killed)','2026-11-23 16:46:39.581341','2026-11-23 16:46:58.502892');
INSERT INTO "attempts" VALUES(2,2,1,'train','runs/test/1/attempts/2.1',1,13,54,1,'stopped','','2026-11-23 16:46:59.275486','2026-11-23 16:47:26.717705');
CREATE TABLE charges (
	id INTEGER NOT NULL, 
	session_id INTEGER, 
	accelerator VARCHAR(64) NOT NULL, 
	factor DOUBLE NOT NULL, 
	from_at DATETIME NOT NULL, 
	used_s DOUBLE NOT NULL, pool VARCHAR(64) DEFAULT '' NOT NULL, why TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_charges PRIMARY KEY (id), 
	CONSTRAINT fk_charges_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL
);
INSERT INTO "charges" VALUES(1,1,'cpu',1.0,'2026-11-23 16:46:39.121789',15.362056,'generic','');
INSERT INTO "charges" VALUES(2,2,'cpu',1.0,'2026-11-23 16:46:58.585648',28.172586,'generic','');
CREATE TABLE checkpoints (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	stage VARCHAR(128) NOT NULL, 
	step INTEGER NOT NULL, 
	final BOOLEAN NOT NULL, 
	path TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	took_s DOUBLE NOT NULL, 
	blocking_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	verified_at DATETIME, source TEXT DEFAULT '' NOT NULL, measured JSON DEFAULT '{}' NOT NULL, best VARCHAR(200) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (id), 
	CONSTRAINT fk_checkpoints_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_checkpoints_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL, 
	CONSTRAINT uq_checkpoints_path UNIQUE (path)
);
INSERT INTO "checkpoints" VALUES(1,'dbafe052a1be',1,'train',13,0,'runs/test/1/checkpoints/train/step-00000013',80348,'dropped','',4.08220140088815242052e-02,3.14493200858123600482e-03,'{"epoch_draw":1.9547837523398686,"loss":0.5204480886459351,"weights":2967.0}','2026-11-23 16:46:52.068971','2026-11-23 16:46:52.112205','','{"epoch_draw":12,"loss":13,"weights":0}','');
INSERT INTO "checkpoints" VALUES(2,'dbafe052a1be',2,'train',26,0,'runs/test/1/checkpoints/train/step-00000026',80349,'verified','',4.44884489988908171653e-02,2.80807299714069813489e-03,'{"epoch_draw":1.471828401411808,"loss":0.5803689360618591,"weights":2967.0}','2026-11-23 16:47:16.667807','2026-11-23 16:47:16.734420','','{"epoch_draw":24,"loss":26,"weights":13}','');
INSERT INTO "checkpoints" VALUES(3,'dbafe052a1be',2,'train',40,0,'runs/test/1/checkpoints/train/step-00000040',80349,'verified','',3.77061849940218962728e-02,3.89642699155956506729e-03,'{"epoch_draw":1.9532894836690091,"loss":1.221815586090088,"weights":2967.0}','2026-11-23 16:47:20.512856','2026-11-23 16:47:20.551345','','{"epoch_draw":36,"loss":40,"weights":13}','');
INSERT INTO "checkpoints" VALUES(4,'dbafe052a1be',2,'train',54,0,'runs/test/1/checkpoints/train/step-00000054',80352,'verified','',5.23866720031946897506e-02,2.10202600283082574605e-03,'{"epoch_draw":1.1300056704664279,"loss":0.4723716378211975,"weights":2967.0}','2026-11-23 16:47:24.225529','2026-11-23 16:47:24.283373','','{"epoch_draw":48,"loss":54,"weights":13}','');
CREATE TABLE curves (
	id INTEGER NOT NULL, 
	attempt_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	lines TEXT NOT NULL, 
	CONSTRAINT pk_curves PRIMARY KEY (id), 
	CONSTRAINT fk_curves_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id) ON DELETE CASCADE, 
	CONSTRAINT uq_curves_attempt_id UNIQUE (attempt_id, number)
);
INSERT INTO "curves" VALUES(1,1,0,'{"s":0,"e":0,"t":1795452408.7,"v":{"weights":2967.0}}
{"s":6,"e":1,"t":1795452410.2,"f":0,"v":{"loss":[4.27892299,6]}}
{"s":6,"e":1,"t":1795452410.2,"v":{"epoch_draw":0.9602897961688472}}
{"s":10,"e":2,"t":1795452411.3,"f":6,"v":{"loss":[2.95900893,4]}}
{"s":12,"e":2,"t":1795452411.8,"f":10,"v":{"loss":[1.18760368,2]}}
{"s":12,"e":2,"t":1795452411.8,"v":{"epoch_draw":1.9547837523398686}}
{"s":13,"e":3,"t":1795452412.1,"f":12,"v":{"loss":[0.520448089,1]}}
{"s":18,"e":3,"t":1795452413.4,"f":13,"v":{"loss":[0.928133154,5]}}
{"s":18,"e":3,"t":1795452413.4,"v":{"epoch_draw":1.4105435240065558}}
{"s":23,"e":4,"t":1795452414.7,"f":18,"v":{"loss":[0.923288977,5]}}');
INSERT INTO "curves" VALUES(2,2,0,'{"s":13,"e":3,"t":1795452433.3,"v":{"weights":2967.0}}
{"s":18,"e":3,"t":1795452434.6,"f":13,"v":{"loss":[0.928133154,5]}}
{"s":18,"e":3,"t":1795452434.6,"v":{"epoch_draw":1.4105435240065558}}
{"s":22,"e":4,"t":1795452435.6,"f":18,"v":{"loss":[0.996149272,4]}}
{"s":24,"e":4,"t":1795452436.1,"f":22,"v":{"loss":[0.517223373,2]}}
{"s":24,"e":4,"t":1795452436.1,"v":{"epoch_draw":1.471828401411808}}
{"s":26,"e":5,"t":1795452436.7,"f":24,"v":{"loss":[0.716197282,2]}}
{"s":30,"e":5,"t":1795452437.8,"f":26,"v":{"loss":[0.468338914,4]}}
{"s":30,"e":5,"t":1795452437.8,"v":{"epoch_draw":2.47535715265508}}
{"s":36,"e":6,"t":1795452439.4,"f":30,"v":{"loss":[0.450799495,6]}}
{"s":36,"e":6,"t":1795452439.4,"v":{"epoch_draw":1.9532894836690091}}
{"s":40,"e":7,"t":1795452440.5,"f":36,"v":{"loss":[0.687285762,4]}}
{"s":42,"e":7,"t":1795452441.1,"f":40,"v":{"loss":[0.329071149,2]}}
{"s":42,"e":7,"t":1795452441.1,"v":{"epoch_draw":0.1721012067008698}}
{"s":48,"e":8,"t":1795452442.6,"f":42,"v":{"loss":[0.476214541,6]}}
{"s":48,"e":8,"t":1795452442.6,"v":{"epoch_draw":1.1300056704664279}}
{"s":50,"e":9,"t":1795452443.1,"f":48,"v":{"loss":[0.855708808,2]}}
{"s":54,"e":9,"t":1795452444.2,"f":50,"v":{"loss":[0.548125714,4]}}');
CREATE TABLE events (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	at DATETIME NOT NULL, 
	kind VARCHAR(48) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	facts JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (id), 
	CONSTRAINT fk_events_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_events_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES(1,'dbafe052a1be',1,'2026-11-23 16:46:39.525154','session_opened','starting','{}');
INSERT INTO "events" VALUES(2,'dbafe052a1be',1,'2026-11-23 16:46:39.650190','launched','','{"attempt":"1.1","stage":"train","from":"the beginning","step":0,"step_on_disk":null,"lost_steps":0}');
INSERT INTO "events" VALUES(3,'dbafe052a1be',1,'2026-11-23 16:46:48.505794','attached','training','{"state_bytes":53592}');
INSERT INTO "events" VALUES(4,'dbafe052a1be',1,'2026-11-23 16:46:48.510771','exactness','','{"data":"keyed","deterministic":"not asked for"}');
INSERT INTO "events" VALUES(5,'dbafe052a1be',1,'2026-11-23 16:46:48.511622','memory_facts','','{"batch":"32","num_workers":"0","batchnorm":"True","blocks":"0","device":"cpu","stage":"train"}');
INSERT INTO "events" VALUES(6,'dbafe052a1be',1,'2026-11-23 16:46:51.504390','checkpoint_due','saving','{}');
INSERT INTO "events" VALUES(7,'dbafe052a1be',1,'2026-11-23 16:46:52.123949','checkpoint_verified','training','{"step":13,"took_s":0.040822014008881524,"blocking_s":0.003144932008581236,"bytes":80348,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(8,'dbafe052a1be',1,'2026-11-23 16:46:58.525076','session_lost','cut_off','{"found_by":3409,"why":"no rank left a word (the shim was killed)"}');
INSERT INTO "events" VALUES(9,'dbafe052a1be',2,'2026-11-23 16:46:59.108352','session_opened','starting','{}');
INSERT INTO "events" VALUES(10,'dbafe052a1be',2,'2026-11-23 16:46:59.372103','launched','','{"attempt":"2.1","stage":"train","from":"disk","step":13,"step_on_disk":13,"lost_steps":0}');
INSERT INTO "events" VALUES(11,'dbafe052a1be',2,'2026-11-23 16:47:13.083340','attached','training','{"state_bytes":53624}');
INSERT INTO "events" VALUES(12,'dbafe052a1be',2,'2026-11-23 16:47:13.089090','exactness','','{"data":"keyed","deterministic":"not asked for"}');
INSERT INTO "events" VALUES(13,'dbafe052a1be',2,'2026-11-23 16:47:13.090057','memory_facts','','{"batch":"32","num_workers":"0","batchnorm":"True","blocks":"0","device":"cpu","stage":"train"}');
INSERT INTO "events" VALUES(14,'dbafe052a1be',2,'2026-11-23 16:47:16.079006','checkpoint_due','saving','{}');
INSERT INTO "events" VALUES(15,'dbafe052a1be',2,'2026-11-23 16:47:16.746727','checkpoint_verified','training','{"step":26,"took_s":0.04448844899889082,"blocking_s":0.002808072997140698,"bytes":80349,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(16,'dbafe052a1be',2,'2026-11-23 16:47:19.718625','checkpoint_due','saving','{}');
INSERT INTO "events" VALUES(17,'dbafe052a1be',2,'2026-11-23 16:47:20.553371','checkpoint_verified','training','{"step":40,"took_s":0.037706184994021896,"blocking_s":0.003896426991559565,"bytes":80349,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(18,'dbafe052a1be',2,'2026-11-23 16:47:23.007739','epoch','','{"stage":"train","epoch":8,"step":49,"metrics":{"epoch_draw":1.1300056704664279,"loss":1.1536405086517334,"weights":2967.0},"steps":36,"lasted_s":10.043,"first":true}');
INSERT INTO "events" VALUES(19,'dbafe052a1be',2,'2026-11-23 16:47:23.561431','checkpoint_due','saving','{}');
INSERT INTO "events" VALUES(20,'dbafe052a1be',2,'2026-11-23 16:47:23.577838','stop_requested','stopping','{"reason":"user"}');
INSERT INTO "events" VALUES(21,'dbafe052a1be',2,'2026-11-23 16:47:24.287113','checkpoint_verified','stopping','{"step":54,"took_s":0.05238667200319469,"blocking_s":0.0021020260028308257,"bytes":80352,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(22,'dbafe052a1be',2,'2026-11-23 16:47:26.716925','longest_waits','','{"stage":"train","longest_s":{"evaluation":0.0,"first_step":0.475,"save":0.041,"start":14.442,"step":0.303}}');
INSERT INTO "events" VALUES(23,'dbafe052a1be',2,'2026-11-23 16:47:26.738717','attempt_suspended','suspended','{}');
INSERT INTO "events" VALUES(24,'dbafe052a1be',2,'2026-11-23 16:47:26.817451','forecast','','{"stage":"train","end_at":"2026-11-23T16:48:48Z","earliest_at":"2026-11-23T16:48:19Z","latest_at":"2026-11-23T16:49:37Z","steps_left":186,"sessions":1}');
CREATE TABLE pools (
	name VARCHAR(64) NOT NULL, 
	total_s DOUBLE NOT NULL, 
	resets TEXT NOT NULL, 
	reserve_s DOUBLE NOT NULL, 
	told_at DATETIME NOT NULL, 
	CONSTRAINT pk_pools PRIMARY KEY (name)
);
INSERT INTO "pools" VALUES('generic',360000.0,'Thursday 00:00 UTC',0.0,'2026-11-23 16:46:58.738978');
CREATE TABLE "resumes" (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	due_at DATETIME, 
	why TEXT NOT NULL, 
	tries INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	claimed_by VARCHAR(128) NOT NULL, 
	claimed_at DATETIME, 
	created_at DATETIME NOT NULL, 
	priority INTEGER DEFAULT '0' NOT NULL, 
	claimed_pid INTEGER, 
	claimed_ticks BIGINT, 
	claimed_boot VARCHAR(64) DEFAULT '' NOT NULL, 
	lease_until_at DATETIME, 
	last_error TEXT DEFAULT '' NOT NULL, 
	ranks INTEGER, 
	share BOOLEAN DEFAULT 0 NOT NULL, 
	turn_at DATETIME, reason VARCHAR(16) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_resumes PRIMARY KEY (id), 
	CONSTRAINT fk_resumes_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "resumes" VALUES(1,'dbafe052a1be','local',NULL,'',1,'done','pid 3097','2026-11-23 16:46:39.234676','2026-11-23 16:46:39.234586',0,3097,5137803,'71e18bbe-4df1-4545-bc72-08f4bd401b38',NULL,'',1,0,NULL,'');
INSERT INTO "resumes" VALUES(2,'dbafe052a1be','local','2026-11-23 16:46:58.504249','no rank left a word (the shim was killed)',1,'done','pid 3409','2026-11-23 16:46:58.832075','2026-11-23 16:46:58.543915',0,3409,5139706,'71e18bbe-4df1-4545-bc72-08f4bd401b38',NULL,'',1,0,'2026-11-23 16:46:39.199628','lost');
INSERT INTO "resumes" VALUES(3,'dbafe052a1be','local','2026-11-23 16:47:28.046090','queued by the user',0,'due','',NULL,'2026-11-23 16:47:29.553521',0,NULL,NULL,'',NULL,'',1,0,'2026-11-23 16:46:58.736830','queued');
CREATE TABLE rungs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	plan_hash VARCHAR(64) NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	device VARCHAR(128) NOT NULL, 
	world INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	step INTEGER NOT NULL, 
	rung TEXT NOT NULL, 
	why TEXT NOT NULL, 
	up BOOLEAN NOT NULL, 
	changes_result BOOLEAN NOT NULL, 
	settings JSON NOT NULL, 
	CONSTRAINT pk_rungs PRIMARY KEY (id), 
	CONSTRAINT fk_rungs_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_rungs_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL
);
CREATE TABLE runs (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	number INTEGER NOT NULL, 
	folder TEXT NOT NULL, 
	workdir TEXT NOT NULL, 
	checkpoints TEXT NOT NULL, 
	"plan" TEXT NOT NULL, 
	overrides JSON NOT NULL, 
	plan_hash VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, pool VARCHAR(64) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (id), 
	CONSTRAINT uq_runs_name UNIQUE (name, number)
);
INSERT INTO "runs" VALUES('dbafe052a1be','test',1,'runs/test/1','/w','runs/test/1/checkpoints','name = "test"
[[stage]]
name = "train"
entry = "learns.py"
ranks = 1
args = { epochs = 40, sleep = 0.25 }
[checkpoint]
every = "3000ms"
[session]
[quota]
hours = 100
resets = "Thursday 00:00 UTC"
[resume]
sources = ["../input/**"]
[notify]
urls = []
','[]','a2e9ce92fe6c6366','active','','2026-11-23 16:46:39.106524',NULL,'generic');
CREATE TABLE samples (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	span_s INTEGER NOT NULL, 
	"values" JSON NOT NULL, 
	CONSTRAINT pk_samples PRIMARY KEY (id), 
	CONSTRAINT fk_samples_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES(17,1,'2026-11-23 16:46:00.000000',60,'{"host.cpu":93.75,"host.cores":2,"host.mem_used":4439578880,"host.mem_used.max":4733583360,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":4860.44,"host.disk_write_bps":1627040,"host.disk_free":78786686976,"rank0.rss":258777000,"rank0.rss.max":261148672,"rank0.rss_peak":258778000,"rank0.rss_peak.max":261148672,"rank0.cpu":9.54959,"rank0.step_s":0.263938,"rank0.step_s.max":0.271967,"rank0.data_wait":0.00797911}');
INSERT INTO "samples" VALUES(18,1,'2026-11-23 16:00:00.000000',3600,'{"host.cpu":93.75,"host.cores":2,"host.mem_used":4439578880,"host.mem_used.max":4733583360,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":4860.44,"host.disk_write_bps":1627040,"host.disk_free":78786686976,"rank0.rss":258777000,"rank0.rss.max":261148672,"rank0.rss_peak":258778000,"rank0.rss_peak.max":261148672,"rank0.cpu":9.54959,"rank0.step_s":0.263938,"rank0.step_s.max":0.271967,"rank0.data_wait":0.00797911}');
INSERT INTO "samples" VALUES(19,2,'2026-11-23 16:46:59.105885',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":4464082944,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0}');
INSERT INTO "samples" VALUES(20,2,'2026-11-23 16:47:00.109883',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":4621324288,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":8159.42,"host.disk_write_bps":126471,"host.disk_free":78748225536}');
INSERT INTO "samples" VALUES(21,2,'2026-11-23 16:47:01.109932',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":4849864704,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":4095.83,"host.disk_write_bps":0,"host.disk_free":78748225536}');
INSERT INTO "samples" VALUES(22,2,'2026-11-23 16:47:02.109326',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5003796480,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":1356590,"host.disk_free":78748225536}');
INSERT INTO "samples" VALUES(23,2,'2026-11-23 16:47:03.109934',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5111603200,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":36841.6,"host.disk_free":78748225536}');
INSERT INTO "samples" VALUES(24,2,'2026-11-23 16:47:04.107532',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5178200064,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":4105.87,"host.disk_write_bps":143705,"host.disk_free":78748225536}');
INSERT INTO "samples" VALUES(25,2,'2026-11-23 16:47:05.110119',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5239685120,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":8170.86,"host.disk_write_bps":12256.3,"host.disk_free":78737891328}');
INSERT INTO "samples" VALUES(26,2,'2026-11-23 16:47:06.108031',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5312983040,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78737891328}');
INSERT INTO "samples" VALUES(27,2,'2026-11-23 16:47:07.109873',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5370322944,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":12265.4,"host.disk_write_bps":12265.4,"host.disk_free":78737891328}');
INSERT INTO "samples" VALUES(28,2,'2026-11-23 16:47:08.107941',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5505593344,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":12311.8,"host.disk_write_bps":0,"host.disk_free":78737891328}');
INSERT INTO "samples" VALUES(29,2,'2026-11-23 16:47:09.112782',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5575675904,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":4076.27,"host.disk_write_bps":4076.27,"host.disk_free":78737891328}');
INSERT INTO "samples" VALUES(30,2,'2026-11-23 16:47:10.106258',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5655269376,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":8245.77,"host.disk_write_bps":94826.4,"host.disk_free":78728019968}');
INSERT INTO "samples" VALUES(31,2,'2026-11-23 16:47:11.108869',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5737889792,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78728019968}');
INSERT INTO "samples" VALUES(32,2,'2026-11-23 16:47:12.109831',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5796024320,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":8184.12,"host.disk_write_bps":167775,"host.disk_free":78728019968}');
INSERT INTO "samples" VALUES(33,2,'2026-11-23 16:47:13.115526',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5856006144,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78728019968,"rank0.rss":245604352,"rank0.rss_peak":245608448,"rank0.cpu":41.5851}');
INSERT INTO "samples" VALUES(34,2,'2026-11-23 16:47:14.106314',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5922390016,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78728019968,"rank0.rss":261275648,"rank0.rss_peak":261275648,"rank0.step_s":0.254512,"rank0.data_wait":0.0156742,"rank0.cpu":10.3783}');
INSERT INTO "samples" VALUES(35,2,'2026-11-23 16:47:15.109066',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":5963554816,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78703812608,"rank0.rss":261419008,"rank0.rss_peak":261419008,"rank0.step_s":0.254826,"rank0.data_wait":0.00635426,"rank0.cpu":2.23205}');
INSERT INTO "samples" VALUES(36,2,'2026-11-23 16:47:16.106465',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6010892288,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":624214,"host.disk_free":78703812608,"rank0.rss":261480448,"rank0.rss_peak":261480448,"rank0.step_s":0.25897,"rank0.data_wait":0.00604777,"rank0.cpu":2.4106}');
INSERT INTO "samples" VALUES(37,2,'2026-11-23 16:47:17.114167',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6100439040,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":81737100,"host.disk_free":78703812608,"rank0.rss":261521408,"rank0.rss_peak":261525504,"rank0.step_s":0.291022,"rank0.data_wait":0.00841164,"rank0.cpu":2.64786}');
INSERT INTO "samples" VALUES(38,2,'2026-11-23 16:47:18.109223',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6305796096,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":275795,"host.disk_free":78703812608,"rank0.rss":261529600,"rank0.rss_peak":261529600,"rank0.step_s":0.254204,"rank0.data_wait":0.00465916,"rank0.cpu":1.81666}');
INSERT INTO "samples" VALUES(39,2,'2026-11-23 16:47:19.107884',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6365343744,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":127146,"host.disk_free":78703812608,"rank0.rss":261529600,"rank0.rss_peak":261529600,"rank0.step_s":0.278062,"rank0.data_wait":0.0150257,"rank0.cpu":2.57216}');
INSERT INTO "samples" VALUES(40,2,'2026-11-23 16:47:20.110187',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6377553920,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78702800896,"rank0.rss":261537792,"rank0.rss_peak":261537792,"rank0.step_s":0.270839,"rank0.data_wait":0.00893963,"rank0.cpu":3.21723}');
INSERT INTO "samples" VALUES(41,2,'2026-11-23 16:47:21.106339',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6392127488,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":246708,"host.disk_free":78702800896,"rank0.rss":261558272,"rank0.rss_peak":261558272,"rank0.step_s":0.278143,"rank0.data_wait":0.013086,"rank0.cpu":2.13518}');
INSERT INTO "samples" VALUES(42,2,'2026-11-23 16:47:22.107347',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6424641536,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":36827,"host.disk_free":78702800896,"rank0.rss":261566464,"rank0.rss_peak":261566464,"rank0.step_s":0.26459,"rank0.data_wait":0.00596422,"rank0.cpu":2.30725}');
INSERT INTO "samples" VALUES(43,2,'2026-11-23 16:47:23.106259',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6406930432,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":4883640,"host.disk_free":78702800896,"rank0.rss":261566464,"rank0.rss_peak":261566464,"rank0.step_s":0.254042,"rank0.data_wait":0.00602998,"rank0.cpu":2.02667}');
INSERT INTO "samples" VALUES(44,2,'2026-11-23 16:47:24.106324',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6348783616,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":4095.75,"host.disk_free":78702800896,"rank0.rss":261566464,"rank0.rss_peak":261566464,"rank0.step_s":0.270291,"rank0.data_wait":0.0140157,"rank0.cpu":2.48435}');
INSERT INTO "samples" VALUES(45,2,'2026-11-23 16:47:25.106242',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6340304896,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":151564,"host.disk_free":78689402880,"rank0.rss":261562368,"rank0.rss_peak":261562368,"rank0.step_s":0.263519,"rank0.data_wait":0,"rank0.cpu":1.64124}');
INSERT INTO "samples" VALUES(46,2,'2026-11-23 16:47:26.109849',0,'{"host.cpu":100,"host.cores":2,"host.mem_used":6213861376,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0,"host.disk_free":78689402880,"rank0.rss":261562368,"rank0.rss_peak":261562368,"rank0.step_s":0.263519,"rank0.data_wait":0,"rank0.cpu":1.64124}');
INSERT INTO "samples" VALUES(47,2,'2026-11-23 16:46:00.000000',60,'{"host.cpu":100,"host.cores":2,"host.mem_used":4464082944,"host.mem_used.max":4464082944,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":0,"host.disk_write_bps":0}');
INSERT INTO "samples" VALUES(48,2,'2026-11-23 16:47:00.000000',60,'{"host.cpu":100,"host.cores":2,"host.mem_used":5777290000,"host.mem_used.max":6424641536,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":2578.35,"host.disk_write_bps":3334890,"host.disk_free":78721600000,"rank0.rss":260377000,"rank0.rss.max":261566464,"rank0.rss_peak":260378000,"rank0.rss_peak.max":261566464,"rank0.cpu":5.64971,"rank0.step_s":0.265888,"rank0.step_s.max":0.291022,"rank0.data_wait":0.00801602}');
INSERT INTO "samples" VALUES(49,2,'2026-11-23 16:00:00.000000',3600,'{"host.cpu":100,"host.cores":2,"host.mem_used":5120686472,"host.mem_used.max":6424641536,"host.mem_total":25276502016,"host.swap_used":0,"host.disk_read_bps":1289.17,"host.disk_write_bps":1667445,"host.disk_free":78721600000,"rank0.rss":260377000,"rank0.rss.max":261566464,"rank0.rss_peak":260378000,"rank0.rss_peak.max":261566464,"rank0.cpu":5.64971,"rank0.step_s":0.265888,"rank0.step_s.max":0.291022,"rank0.data_wait":0.00801602}');
CREATE TABLE sessions (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	boot_wall_s DOUBLE, 
	wall_at DATETIME, 
	lead_s DOUBLE NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	supervisor_pid INTEGER, 
	supervisor_started_ticks BIGINT, 
	stage VARCHAR(128) NOT NULL, 
	first_step INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	epochs_total INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	steps_total INTEGER NOT NULL, 
	samples BIGINT NOT NULL, 
	step_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	beat_at DATETIME, exactness JSON DEFAULT '{}' NOT NULL, wall_kind VARCHAR(64) DEFAULT '' NOT NULL, fixed_wall_s DOUBLE, fixed_wall_kind VARCHAR(64) DEFAULT '' NOT NULL, pool VARCHAR(64) DEFAULT '' NOT NULL, reason VARCHAR(16) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (id), 
	CONSTRAINT fk_sessions_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_sessions_run_id UNIQUE (run_id, number)
);
INSERT INTO "sessions" VALUES(1,'dbafe052a1be',1,'local','cut_off','no rank left a word (the shim was killed)','71e18bbe-4df1-4545-bc72-08f4bd401b38',6.1018109942085389046e+05,'2026-11-30 04:00:00.000002',1.21302895479643709105e+02,'2026-11-23 16:46:39.199628','2026-11-23 16:46:58.515697',3097,5137803,'train',0,3,40,22,240,704,2.68391436002275440841e-01,'{"weights":2967.0,"loss":0.6318477988243103,"epoch_draw":1.4105435240065558}','2026-11-23 16:46:54.483845','{}','quota',NULL,'','generic','lost');
INSERT INTO "sessions" VALUES(2,'dbafe052a1be',2,'local','suspended','stopped by the user','71e18bbe-4df1-4545-bc72-08f4bd401b38',610181.099420159,'2026-11-30 03:59:59.999999',1.21329941451543490418e+02,'2026-11-23 16:46:58.736830','2026-11-23 16:47:26.718272',3409,5139706,'train',13,8,40,54,240,1728,2.63519093001377768814e-01,'{"epoch_draw":1.1300056704664279,"loss":0.4723716378211975,"weights":2967.0}','2026-11-23 16:47:24.277400','{}','quota',NULL,'','generic','user');
CREATE TABLE stages (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	position INTEGER NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	finished_at DATETIME, 
	note TEXT NOT NULL, 
	CONSTRAINT pk_stages PRIMARY KEY (id), 
	CONSTRAINT fk_stages_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_stages_run_id UNIQUE (run_id, name)
);
INSERT INTO "stages" VALUES(1,'dbafe052a1be',0,'train',NULL,'');
CREATE INDEX ix_attempts_reached ON attempts (session_id, stage, last_step);
CREATE INDEX ix_charges_from_at ON charges (from_at);
CREATE INDEX ix_charges_pool_from_at ON charges (pool, from_at);
CREATE INDEX ix_charges_session_id ON charges (session_id);
CREATE INDEX ix_checkpoints_run_id ON checkpoints (run_id);
CREATE INDEX ix_checkpoints_session_id ON checkpoints (session_id);
CREATE INDEX ix_checkpoints_standing ON checkpoints (run_id, state, stage, step);
CREATE INDEX ix_events_run_id_id ON events (run_id, id);
CREATE INDEX ix_events_run_id_kind ON events (run_id, kind, id);
CREATE INDEX ix_events_session_id_kind ON events (session_id, kind, id);
CREATE INDEX ix_resumes_due_at ON resumes (due_at);
CREATE INDEX ix_resumes_run_id ON resumes (run_id);
CREATE INDEX ix_resumes_run_id_state ON resumes (run_id, state);
CREATE INDEX ix_resumes_share_state_due_at ON resumes (share, state, due_at);
CREATE INDEX ix_resumes_state ON resumes (state);
CREATE INDEX ix_resumes_state_due_at ON resumes (state, due_at);
CREATE INDEX ix_rungs_plan ON rungs (plan_hash, stage, device, world);
CREATE INDEX ix_rungs_run_id_id ON rungs (run_id, id);
CREATE INDEX ix_runs_created_at ON runs (created_at);
CREATE INDEX ix_runs_state_created_at ON runs (state, created_at);
CREATE INDEX ix_samples_session_span_at ON samples (session_id, span_s, at);
CREATE INDEX ix_sessions_phase ON sessions (phase);
CREATE UNIQUE INDEX uq_resumes_waiting ON resumes (run_id) WHERE state IN ('due', 'claimed');
COMMIT;
